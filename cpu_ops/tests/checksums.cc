// Runs every operation of every instruction set of this machine, or of those
// that are named as arguments, on fixed inputs and prints, for each, a line of
// its name, that of the instruction set, the bits of its registers and a
// checksum of all it wrote.
//
// An operation has the same checksum on every machine: compare_isas.py holds
// this. A new one gets a function that calls ForEachCase, and a line in
// PrintAll.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../dispatch.h"

namespace sojax {
namespace {

const char* const kGradNames[] = {"float32", "bfloat16", "float16"};
const char* const kMasterNames[] = {"", "/split"};
const char* const kWeightNames[] = {"", "/float32", "/bfloat16", "/float16"};
const char* const kFormNames[] = {"2", "3"};

// What the numbers of a case are like.
enum class Kind {
  kUsual,      // moments and gradients as in training
  kSubnormal,  // most of them below the smallest normal float
  kExtreme,    // zeros, infinities, NaN and the ends of each range among them
  kAnyBits,    // any bit pattern
};
const Kind kKinds[] = {Kind::kUsual, Kind::kSubnormal, Kind::kExtreme,
                       Kind::kAnyBits};

// SplitMix64: a fixed sequence on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  std::uint32_t Bits() { return static_cast<std::uint32_t>(Next() >> 32); }
  std::size_t Below(std::size_t n) { return Next() % n; }
  // In [-1, 1), exact.
  float Signed() {
    return static_cast<float>(static_cast<std::int32_t>(Bits()) >> 8) *
           0x1p-23f;
  }

 private:
  std::uint64_t state_;
};

float FromBits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Magnitudes at the ends of float's ranges, and where narrower types round to
// infinity or to zero.
const std::uint32_t kExtremes[] = {
    0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x33000000, 0x33000001,
    0x387fffff, 0x38800000, 0x3f800000, 0x3f808000, 0x3f818000, 0x477fefff,
    0x477ff000, 0x60000000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000,
    0x7f800001, 0x7fc00000, 0x7fffffff};

float Number(Random& random, Kind kind, float scale) {
  switch (kind) {
    case Kind::kUsual:
      return random.Signed() * scale;
    case Kind::kSubnormal:
      return FromBits((random.Bits() & 0x80ffffffu) >>
                      (random.Below(4) == 0 ? random.Below(20) : 0));
    case Kind::kExtreme: {
      if (random.Below(3) == 0) return random.Signed() * scale;
      const std::uint32_t sign = random.Bits() & 0x80000000u;
      return FromBits(sign | kExtremes[random.Below(std::size(kExtremes))]);
    }
    case Kind::kAnyBits:
      return FromBits(random.Bits());
  }
  return 0;
}

// FNV-1a over 64-bit words.
class Checksum {
 public:
  void Add(std::uint64_t word) { hash_ = (hash_ ^ word) * 0x100000001b3u; }
  std::uint64_t value() const { return hash_ ^ hash_ >> 32; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

// An array that starts `offset` bytes past a cache line, between guards.
template <class T>
class Guarded {
 public:
  Guarded(std::size_t n, std::size_t offset)
      : num_elems_(n),
        offset_(offset),
        memory_(n * sizeof(T) + 4 * kGuardBytes, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = (0 - address) % kGuardBytes + kGuardBytes + offset;
  }
  // A copy is as far from a cache line.
  Guarded(const Guarded& other) : Guarded(other.num_elems_, other.offset_) {
    std::memcpy(data(), other.memory_.data() + other.start_,
                num_elems_ * sizeof(T));
  }
  Guarded& operator=(const Guarded&) = delete;
  T* data() { return reinterpret_cast<T*>(memory_.data() + start_); }
  void Set(std::size_t i, T value) {
    std::memcpy(memory_.data() + start_ + i * sizeof(T), &value, sizeof(T));
  }
  T Get(std::size_t i) const {
    T value;
    std::memcpy(&value, memory_.data() + start_ + i * sizeof(T), sizeof(T));
    return value;
  }

  // Adds the bits of all elements, those of a NaN as if there were but one,
  // and how many bytes of the guards have been written.
  void AddTo(Checksum& checksum) const {
    for (std::size_t i = 0; i < num_elems_; ++i) AddTo(checksum, i);
    const std::size_t end = start_ + num_elems_ * sizeof(T);
    std::uint64_t num_written = 0;
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (i < start_ || i >= end) num_written += memory_[i] != kGuard;
    }
    checksum.Add(num_written);
  }
  // Adds one element.
  void AddTo(Checksum& checksum, std::size_t i) const {
    AddElem(checksum, Get(i));
  }

 private:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr unsigned char kGuard = 0xa5;

  static void AddElem(Checksum& checksum, float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    checksum.Add(std::isnan(x) ? 0x7fc00000u : bits);
  }
  static void AddElem(Checksum& checksum, double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    checksum.Add(std::isnan(x) ? 0x7ff8000000000000u : bits);
  }
  static void AddElem(Checksum& checksum, std::int16_t x) {
    checksum.Add(static_cast<std::uint16_t>(x));
  }
  static void AddElem(Checksum& checksum, std::uint16_t x) { checksum.Add(x); }
  static void AddElem(Checksum& checksum, std::uint8_t x) { checksum.Add(x); }

  std::size_t num_elems_;
  std::size_t offset_;
  std::vector<unsigned char> memory_;
  std::size_t start_;
};

// The arrays of one run of n elements.
struct Case {
  Case(std::size_t n, std::size_t offset, Kind kind, std::uint64_t seed)
      : num_elems(n),
        p(n, offset),
        p_high(n, offset),
        p_low(n, offset * 15 % 64),
        mu(n, offset * 3 % 64),
        nu(n, offset * 5 % 64),
        sum(n, offset * 17 % 64),
        grad(n, offset * 7 % 64),
        grad_half(n, offset * 9 % 64),
        weight(n, offset * 11 % 64),
        weight_half(n, offset * 13 % 64),
        sumsq(NumChunks(n), offset) {
    Random random(seed);
    for (std::size_t i = 0; i < n; ++i) {
      p.Set(i, Number(random, kind, 1.0f));
      p_high.Set(i, HalfBits(random, kind));
      p_low.Set(i, static_cast<std::int16_t>(random.Bits() & 0xffff));
      mu.Set(i, Number(random, kind, 1e-2f));
      const float x = Number(random, kind, 1e-2f);
      // Only what is no number can make nu negative.
      nu.Set(i, kind == Kind::kUsual ? x * x : std::fabs(x));
      sum.Set(i, Number(random, kind, 1.0f));
      grad.Set(i, Number(random, kind, 1.0f));
      grad_half.Set(i, HalfBits(random, kind));
      weight.Set(i, 0.0f);
      weight_half.Set(i, 0);
    }
    for (std::size_t i = 0; i < NumChunks(n); ++i) sumsq.Set(i, -1.0);
  }

  // Bits that are usual, subnormal or anything in either of the types.
  static std::uint16_t HalfBits(Random& random, Kind kind) {
    const std::uint32_t bits = random.Bits();
    switch (kind) {
      case Kind::kUsual:
        return static_cast<std::uint16_t>(0x3800 | (bits & 0x87ff));
      case Kind::kSubnormal:
        return static_cast<std::uint16_t>(bits & 0x807f);
      default:
        return static_cast<std::uint16_t>(bits);
    }
  }

  const void* GradData(GradType type) {
    if (type == GradType::kFloat32) return grad.data();
    return grad_half.data();
  }

  // `fused` adds the gradients to others and sums up the squares.
  AdamBuffers Buffers(const Layout& layout, bool fused) {
    const bool is_split = layout.master == MasterType::kSplit;
    AdamBuffers b{};
    b.p = p.data();
    if (is_split) b.p = p_high.data();
    if (is_split) b.p_low = p_low.data();
    b.mu = mu.data();
    b.nu = nu.data();
    b.grad = GradData(layout.grad);
    if (layout.weight != WeightType::kNone) b.weight = weight_half.data();
    if (layout.weight == WeightType::kFloat32) b.weight = weight.data();
    if (fused) b.sum = sum.data();
    if (fused) b.sumsq = sumsq.data();
    return b;
  }

  void AddTo(Checksum& checksum) const {
    for (const auto* x : {&p, &mu, &nu, &sum, &grad, &weight}) {
      x->AddTo(checksum);
    }
    for (const auto* x : {&p_high, &grad_half, &weight_half}) {
      x->AddTo(checksum);
    }
    p_low.AddTo(checksum);
    sumsq.AddTo(checksum);
  }

  std::size_t num_elems;
  Guarded<float> p;
  Guarded<std::uint16_t> p_high;
  Guarded<std::int16_t> p_low;
  Guarded<float> mu, nu, sum, grad;
  Guarded<std::uint16_t> grad_half;
  Guarded<float> weight;
  Guarded<std::uint16_t> weight_half;
  Guarded<double> sumsq;
};

const AdamParams kParams = {0.9f,  0.95f,  0.1f,   0.05f, 2.0f,
                            1e-9f, -1e-3f, -1e-4f, 1e-8f, 0.5f};

// Elements past the end, which are zeros, become NaN.
const AdamParams kNoEps = {0.9f, 0.95f,  0.1f,   0.05f, 2.0f,
                           0.0f, -1e-3f, -1e-4f, 0.0f,  0.5f};

constexpr float kRedoGradScale = 0.125f;

// A case and the record of a step of it.
struct RecordedCase {
  RecordedCase(const Case& from, RecordForm form)
      : x(from),
        codes(CodesBytes(form, x.num_elems), 0),
        escapes(MaxEscapes(x.num_elems), 0) {}

  void Take(const KernelTable& kernels, std::size_t layout, bool fused,
            RecordForm form, const AdamParams& params = kParams) {
    num_escapes =
        kernels.layouts[layout].record[static_cast<std::size_t>(form)](
            params, x.Buffers(kLayouts[layout], fused), codes.data(),
            escapes.data(), x.num_elems);
  }
  Escapes GetEscapes() { return {escapes.data(), num_escapes}; }

  void AddTo(Checksum& checksum) const {
    x.AddTo(checksum);
    codes.AddTo(checksum);
    checksum.Add(num_escapes);
    for (std::size_t i = 0; i < num_escapes; ++i) escapes.AddTo(checksum, i);
  }

  Case x;
  Guarded<std::uint8_t> codes;
  Guarded<float> escapes;
  std::size_t num_escapes = 0;
};

// Fixed cases of every kind: all short lengths, and those next to a chunk.
std::vector<Case> MakeCases() {
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 67; ++n) lengths.push_back(n);
  for (std::size_t n : {130, 1021, 4095, 4097}) lengths.push_back(n);
  std::vector<Case> cases;
  for (Kind kind : kKinds) {
    for (std::size_t n : lengths) {
      cases.emplace_back(n, cases.size() * 2 % 64, kind, cases.size());
    }
  }
  return cases;
}

// Calls run(case, checksum) for copies of the cases and prints what it adds.
template <class Run>
void ForEachCase(const std::string& operation, const KernelTable& kernels,
                 const Run& run) {
  static const std::vector<Case>& cases = *new std::vector<Case>(MakeCases());
  Checksum checksum;
  for (const Case& x : cases) run(x, checksum);
  std::printf("%s %s %u %016" PRIx64 "\n", operation.c_str(), kernels.isa,
              kernels.vector_bits, checksum.value());
}

std::string LayoutName(const Layout& layout) {
  return std::string(kGradNames[static_cast<std::size_t>(layout.grad)]) +
         kMasterNames[static_cast<std::size_t>(layout.master)] +
         kWeightNames[static_cast<std::size_t>(layout.weight)];
}

void PrintSteps(const KernelTable& kernels) {
  for (std::size_t i = 0; i < kNumLayouts; ++i) {
    const auto run = [&](const Case& original, Checksum& checksum) {
      for (bool fused : {false, true}) {
        Case x(original);
        kernels.layouts[i].step(kParams, x.Buffers(kLayouts[i], fused),
                                x.num_elems);
        x.AddTo(checksum);
      }
    };
    ForEachCase("step/" + LayoutName(kLayouts[i]), kernels, run);
  }
}

void PrintRecords(const KernelTable& kernels, std::size_t layout,
                  RecordForm form) {
  const auto form_index = static_cast<std::size_t>(form);
  const std::string name =
      std::string(kFormNames[form_index]) + "/" + LayoutName(kLayouts[layout]);
  const LayoutKernels& functions = kernels.layouts[layout];
  const auto record = [&](const Case& original, Checksum& checksum) {
    for (bool fused : {false, true}) {
      for (const AdamParams& params : {kParams, kNoEps}) {
        RecordedCase x(original, form);
        x.Take(kernels, layout, fused, form, params);
        x.AddTo(checksum);
      }
    }
  };
  ForEachCase("record" + name, kernels, record);

  // Whoever recorded, anyone can undo.
  const auto undo = [&](const Case& original, Checksum& checksum) {
    RecordedCase x(original, form);
    x.Take(kScalarKernels, layout, true, form);
    checksum.Add(functions.undo[form_index](
        kParams, x.x.Buffers(kLayouts[layout], true), x.codes.data(),
        x.GetEscapes(), x.x.num_elems));
    x.AddTo(checksum);
  };
  ForEachCase("undo" + name, kernels, undo);
  const auto redo = [&](const Case& original, Checksum& checksum) {
    RecordedCase x(original, form);
    x.Take(kScalarKernels, layout, true, form);
    checksum.Add(functions.redo[form_index](
        kParams, kRedoGradScale, x.x.Buffers(kLayouts[layout], true),
        x.codes.data(), x.GetEscapes(), x.x.num_elems));
    x.AddTo(checksum);
  };
  ForEachCase("redo" + name, kernels, redo);
}

void PrintSums(const KernelTable& kernels, const char* name,
               const AccumulateFn (&functions)[kNumGradTypes]) {
  for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
    const auto run = [&](const Case& original, Checksum& checksum) {
      for (bool squares : {false, true}) {
        Case x(original);
        functions[grad]({x.p.data(), x.GradData(static_cast<GradType>(grad)),
                         squares ? x.sumsq.data() : nullptr},
                        x.num_elems);
        x.AddTo(checksum);
      }
    };
    ForEachCase(std::string(name) + "/" + kGradNames[grad], kernels, run);
  }
}

void PrintSquares(const KernelTable& kernels) {
  for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
    const auto run = [&](const Case& original, Checksum& checksum) {
      for (bool adds : {false, true}) {
        Case x(original);
        kernels.squares[grad](
            {adds ? x.sum.data() : nullptr,
             x.GradData(static_cast<GradType>(grad)), x.sumsq.data()},
            x.num_elems);
        x.AddTo(checksum);
      }
    };
    ForEachCase(std::string("squares/") + kGradNames[grad], kernels, run);
  }
}

void PrintNarrowing(const KernelTable& kernels) {
  for (std::size_t weight = 1; weight < kNumWeightTypes; ++weight) {
    const bool is_wide =
        weight == static_cast<std::size_t>(WeightType::kFloat32);
    const auto run = [&](const Case& original, Checksum& checksum) {
      Case x(original);
      void* to = x.weight_half.data();
      if (is_wide) to = x.weight.data();
      kernels.narrow[weight](x.p.data(), to, x.num_elems);
      x.AddTo(checksum);
    };
    ForEachCase(std::string("narrow") + kWeightNames[weight], kernels, run);
  }
}

void PrintAll(const std::vector<std::string>& isas) {
  for (const KernelTable* kernels : AvailableKernels()) {
    if (!isas.empty() &&
        std::find(isas.begin(), isas.end(), kernels->isa) == isas.end()) {
      continue;
    }
    PrintSteps(*kernels);
    for (RecordForm form : {RecordForm::kTwoBytes, RecordForm::kThreeBytes}) {
      for (std::size_t i = 0; i < kNumLayouts; ++i) {
        PrintRecords(*kernels, i, form);
      }
    }
    PrintSums(*kernels, "widen", kernels->widen);
    PrintSums(*kernels, "accumulate", kernels->accumulate);
    PrintSquares(*kernels);
    PrintNarrowing(*kernels);
  }
}

}  // namespace
}  // namespace sojax

int main(int argc, char** argv) {
  sojax::PrintAll({argv + 1, argv + argc});
  return 0;
}
