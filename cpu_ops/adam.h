// The AdamW step on the CPU: its parameters and its buffers.
#ifndef CPU_OPS_ADAM_H_
#define CPU_OPS_ADAM_H_

#include <cstddef>
#include <cstdint>

namespace sojax {

// Scalars of one step, each rounded once from double to float by the caller,
// where t is the number of the step, counted from 1.
struct AdamParams {
  float b1;            // decay of mu
  float b2;            // decay of nu
  float one_minus_b1;  // 1 - b1, from the unrounded b1
  float one_minus_b2;  // 1 - b2
  float k;             // 1 / sqrt(1 - b2^t)
  float r;             // eps_root * (1 - b2^t)
  float s;             // -lr / (1 - b1^t)
  float d;             // -lr * weight_decay
  float eps;
  float grad_scale;  // multiplies every gradient before anything else
};

// One flat run of parameters. The arrays must not overlap, and may start at
// any byte address.
struct AdamBuffers {
  void* p;              // master weights: float, or the high halves, updated
  std::int16_t* p_low;  // split masters: the remainders, updated; else nullptr
  float* mu;            // first moments, updated
  float* nu;            // second moments, updated
  const float* sum;     // nullptr, or what the gradients are added to
  const void* grad;     // elements of the instance's GradType
  void* weight;         // elements of the instance's WeightType; written only
  double* sumsq;        // nullptr, or written: see SquaresFn
};

// Updates n elements:
//     g  = (sum + grad) * grad_scale
//     mu = fma(mu, b1, one_minus_b1 * g)
//     nu = fma(nu, b2, one_minus_b2 * (g * g))
//     p  = p + fma(p, d, mu / fma(sqrt(nu + r), k, eps) * s)
// with every operation rounded to float on its own and denormals kept. A split
// master that is not a number becomes high = 0x7fc0, low = 0. If sumsq is
// given, it gets the sums of squares of sum + grad by chunks. The gradient and
// sum are left as they are.
//
// The bits depend on nothing but the inputs: not on the instruction set, on
// where a run is cut, or on alignment (NaN payloads excepted). The
// floating-point environment of the calling thread is left as it was found.
using AdamStepFn = void (*)(const AdamParams& params,
                            const AdamBuffers& buffers, std::size_t n);

}  // namespace sojax

#endif  // CPU_OPS_ADAM_H_
