// Records of AdamW steps, and how steps are taken back with them.
//
// From the state after a step and its gradient, the formulas give an estimate
// of the state before it. A record holds how far each estimate is off, as a
// difference of the floats' bits: a code of 4 or 8 bits. Where a code does not
// fit, an escape marks it, and the float itself is kept in a list.
#ifndef CPU_OPS_RECORD_H_
#define CPU_OPS_RECORD_H_

#include <cstddef>
#include <cstdint>

#include "adam.h"

namespace sojax {

// Bytes of codes for each parameter.
//   kThreeBytes: 8 bits each for mu, nu and p.
//   kTwoBytes: 8 bits for mu, 4 each for nu and p.
// Codes are two's complement; the most negative one, -128 or -8, is the
// escape. Of two codes of 4 bits, the first is in the low bits.
enum class RecordForm { kTwoBytes, kThreeBytes };
inline constexpr std::size_t kNumRecordForms = 2;

// Codes are stored by groups: those of mu of so many elements, of nu, of p.
// The last group is as large as the others and ends in zeros.
inline constexpr std::size_t kGroupElems = 64;

constexpr std::size_t BytesPerElem(RecordForm form) {
  return form == RecordForm::kThreeBytes ? 3 : 2;
}

// Returns the bytes of the codes of n elements.
constexpr std::size_t CodesBytes(RecordForm form, std::size_t n) {
  return (n / kGroupElems + (n % kGroupElems != 0)) * kGroupElems *
         BytesPerElem(form);
}

// Returns the most escapes that n elements can have.
constexpr std::size_t MaxEscapes(std::size_t n) { return 3 * n; }

// Takes a step as an AdamStepFn does and records it: `codes`, CodesBytes(n)
// from an address that is a multiple of 64, and `escapes`, at most
// MaxEscapes(n), in the order of the elements, for each mu, nu, p. Returns the
// number of escapes.
using RecordFn = std::size_t (*)(const AdamParams& params,
                                 const AdamBuffers& buffers,
                                 std::uint8_t* codes, float* escapes,
                                 std::size_t n);

// The escapes of a record; `count` guards the end of the array.
struct Escapes {
  const float* floats;
  std::size_t count;
};

// Restores every bit of p, mu and nu, given the parameters, gradient and sum
// of the step. Does not write weights. Returns the number of escapes that the
// codes asked for: more than there are, if the record is not of this step.
using UndoFn = std::size_t (*)(const AdamParams& params,
                               const AdamBuffers& buffers,
                               const std::uint8_t* codes, Escapes escapes,
                               std::size_t n);

// Undoes the step and takes it again with another grad_scale, in one pass.
using RedoFn = std::size_t (*)(const AdamParams& params, float new_grad_scale,
                               const AdamBuffers& buffers,
                               const std::uint8_t* codes, Escapes escapes,
                               std::size_t n);

}  // namespace sojax

#endif  // CPU_OPS_RECORD_H_
