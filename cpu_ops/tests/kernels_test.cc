// What Python cannot see of the kernels: the floating-point mode after a kernel
// and reads past an array (with ASan). Prints the first fault and returns 1.
#include <cstddef>
#include <cstdint>

#include "../dispatch.h"
#include "../fp_mode.h"
#include "testing.h"

namespace sojax {
namespace {

template <class Function>
void ForEachInstance(const Function& function) {
  for (const KernelTable* kernels : AvailableKernels()) {
    for (std::size_t layout = 0; layout < kNumLayouts; ++layout) {
      for (bool fused : {false, true}) function(*kernels, layout, fused);
    }
  }
}

template <class Function>
void ForEachRecordInstance(const Function& function) {
  ForEachInstance([&](const KernelTable& kernels, std::size_t layout,
                      bool fused) {
    for (RecordForm form : {RecordForm::kTwoBytes, RecordForm::kThreeBytes}) {
      function(kernels, layout, fused, form);
    }
  });
}

void TakeRecord(const KernelTable& kernels, const AdamSegment& segment,
                RecordBlock& record) {
  record.count = kernels.layouts[segment.layout]
                     .record[static_cast<std::size_t>(record.form)](
                         kParams, segment.buffers, record.codes,
                         record.escapes.data(), segment.num_elems);
}

void Undo(const KernelTable& kernels, const AdamSegment& segment,
          RecordBlock& record) {
  const std::size_t count =
      kernels.layouts[segment.layout]
          .undo[static_cast<std::size_t>(record.form)](
              kParams, segment.buffers, record.codes,
              {record.escapes.data(), record.count}, segment.num_elems);
  CHECK(count == record.count);
}

void Redo(const KernelTable& kernels, const AdamSegment& segment,
          RecordBlock& record) {
  const std::size_t count =
      kernels.layouts[segment.layout]
          .redo[static_cast<std::size_t>(record.form)](
              kParams, 0.25f, segment.buffers, record.codes,
              {record.escapes.data(), record.count}, segment.num_elems);
  CHECK(count == record.count);
}

template <class Function>
void ForEachSumInstance(const Function& function) {
  for (const KernelTable* kernels : AvailableKernels()) {
    for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
      for (bool adds : {false, true}) {
        for (bool squares : {false, true}) {
          function(*kernels, static_cast<GradType>(grad), adds, squares);
        }
      }
    }
  }
}

void TestEveryLengthAndOffsetEqualsTheScalarTwin() {
  ForEachInstance(
      [](const KernelTable& kernels, std::size_t layout, bool fused) {
        for (std::size_t n = 0; n <= 65; ++n) {
          for (std::size_t offset : {0, 1, 2, 4, 6, 12, 20, 32}) {
            State actual(n, offset, 0.1f);
            State expected(n, 0, 0.1f);
            Step(kernels, actual.Segment(layout, fused));
            Step(kScalarKernels, expected.Segment(layout, fused));
            CHECK(actual == expected);
          }
        }
      });
}

void TestRecordsOfEveryLengthEqualTheScalarTwinAndComeBack() {
  ForEachRecordInstance([](const KernelTable& kernels, std::size_t layout,
                           bool fused, RecordForm form) {
    std::size_t offset = 0;
    for (std::size_t n = 0; n <= 130; ++n, offset = (offset + 7) % 64) {
      State actual(n, offset, 0.1f);
      State expected(n, 0, 0.1f);
      const State before(n, offset, 0.1f);
      RecordBlock record(form, n);
      RecordBlock expected_record(form, n);
      const AdamSegment segment = actual.Segment(layout, fused);
      const AdamSegment expected_segment = expected.Segment(layout, fused);
      TakeRecord(kernels, segment, record);
      TakeRecord(kScalarKernels, expected_segment, expected_record);
      CHECK(actual == expected);
      CHECK(record == expected_record);
      Undo(kernels, segment, record);
      CHECK(SameState(actual, before, segment));
      TakeRecord(kernels, segment, record);
      Redo(kernels, segment, record);
      Redo(kScalarKernels, expected_segment, expected_record);
      CHECK(actual == expected);
    }
  });
}

void TestSquaresAndWeightsEqualTheScalarTwin() {
  for (const KernelTable* kernels : AvailableKernels()) {
    for (std::size_t n : {0, 1, 15, 16, 17, 49, 4095, 4097, 8199}) {
      for (std::size_t type = 0; type < kNumGradTypes; ++type) {
        State actual(n, 2, 0.1f);
        State expected(n, 0, 0.1f);
        const auto grad_type = static_cast<GradType>(type);
        kernels->squares[type]({actual.sum.data(), actual.GradData(grad_type),
                                actual.sumsq.data()},
                               n);
        kScalarKernels.squares[type](
            {expected.sum.data(), expected.GradData(grad_type),
             expected.sumsq.data()},
            n);
        CHECK(actual == expected);
        void* weight = type == 0 ? static_cast<void*>(actual.weight.data())
                                 : actual.weight_half.data();
        void* expected_weight = type == 0
                                    ? static_cast<void*>(expected.weight.data())
                                    : expected.weight_half.data();
        kernels->narrow[type + 1](actual.p.data(), weight, n);
        kScalarKernels.narrow[type + 1](expected.p.data(), expected_weight, n);
        CHECK(actual == expected);
      }
    }
  }
}

void TestSumsOfEveryLengthAndOffsetEqualTheScalarTwin() {
  ForEachSumInstance([](const KernelTable& kernels, GradType grad_type,
                        bool adds, bool squares) {
    const auto check = [&](std::size_t n, std::size_t offset) {
      State actual(n, offset, 0.1f);
      State expected(n, 0, 0.1f);
      Sum(kernels, adds, actual.SumSegment(grad_type, squares));
      Sum(kScalarKernels, adds, expected.SumSegment(grad_type, squares));
      CHECK(actual == expected);
    };
    for (std::size_t n = 0; n <= 49; ++n) {
      for (std::size_t offset : {0, 1, 2, 4, 6, 12, 20, 32}) check(n, offset);
    }
    for (std::size_t n : {4095, 4096, 4097, 8199}) check(n, 2);
  });
}

#if defined(__x86_64__)
// Flush to zero, denormals are zero, round down, a sticky flag.
constexpr FpWord kStrangeFpMode = 0x1f80 | 0x8040 | 0x2000 | 0x0020;
#else
// Flush to zero, default NaN, round down, a sticky flag.
constexpr FpWord kStrangeFpMode =
    (1u << 24) | (1u << 25) | (2u << 22) | (FpWord{1} << 33);
#endif

// Calls the function in a strange mode, which it must leave alone.
template <class Function>
void InStrangeFpMode(const Function& function) {
  const FpWord before = ReadFpMode();
  WriteFpMode(kStrangeFpMode);
  function();
  const FpWord after = ReadFpMode();
  WriteFpMode(before);
  CHECK(after == kStrangeFpMode);
}

void TestTheModeOfTheCallerDoesNotMatterAndIsPutBack() {
  ForEachRecordInstance([](const KernelTable& kernels, std::size_t layout,
                           bool fused, RecordForm form) {
    State actual(101, 0, 1e-39f);
    State expected(101, 0, 1e-39f);
    const State before(101, 0, 1e-39f);
    RecordBlock record(form, 101);
    RecordBlock expected_record(form, 101);
    const AdamSegment expected_segment = expected.Segment(layout, fused);
    const AdamSegment segment = actual.Segment(layout, fused);
    TakeRecord(kScalarKernels, expected_segment, expected_record);
    InStrangeFpMode([&] { TakeRecord(kernels, segment, record); });
    CHECK(actual == expected);
    CHECK(record == expected_record);
    InStrangeFpMode([&] { Undo(kernels, segment, record); });
    CHECK(SameState(actual, before, segment));
    InStrangeFpMode([&] { Step(kernels, segment); });
    CHECK(actual == expected);
    Redo(kScalarKernels, expected_segment, expected_record);
    InStrangeFpMode([&] { Redo(kernels, segment, record); });
    CHECK(actual == expected);
  });
  ForEachSumInstance([](const KernelTable& kernels, GradType grad_type,
                        bool adds, bool squares) {
    State actual(101, 0, 1e-39f);
    State expected(101, 0, 1e-39f);
    Sum(kScalarKernels, adds, expected.SumSegment(grad_type, squares));
    const AccumulateSegment segment = actual.SumSegment(grad_type, squares);
    InStrangeFpMode([&] { Sum(kernels, adds, segment); });
    CHECK(actual == expected);
  });
}

}  // namespace
}  // namespace sojax

int main() {
  sojax::TestEveryLengthAndOffsetEqualsTheScalarTwin();
  sojax::TestRecordsOfEveryLengthEqualTheScalarTwinAndComeBack();
  sojax::TestSquaresAndWeightsEqualTheScalarTwin();
  sojax::TestSumsOfEveryLengthAndOffsetEqualTheScalarTwin();
  sojax::TestTheModeOfTheCallerDoesNotMatterAndIsPutBack();
  return 0;
}
