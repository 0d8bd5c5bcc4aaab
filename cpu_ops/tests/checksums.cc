// Runs every operation of every instruction set of this machine on fixed
// inputs and prints, for each, a line of its name, that of the instruction
// set, the bits of its registers and a checksum of all it wrote.
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

const char* const kTypeNames[] = {"float32", "bfloat16", "float16"};
const char* const kWeightNames[] = {"none", "float32", "bfloat16", "float16"};

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
      : num_elems_(n), memory_(n * sizeof(T) + 4 * kGuardBytes, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = (0 - address) % kGuardBytes + kGuardBytes + offset;
  }
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
    for (std::size_t i = 0; i < num_elems_; ++i) AddElem(checksum, Get(i));
    const std::size_t end = start_ + num_elems_ * sizeof(T);
    std::uint64_t num_written = 0;
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (i < start_ || i >= end) num_written += memory_[i] != kGuard;
    }
    checksum.Add(num_written);
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
  static void AddElem(Checksum& checksum, std::uint16_t x) { checksum.Add(x); }

  std::size_t num_elems_;
  std::vector<unsigned char> memory_;
  std::size_t start_;
};

// The arrays of one run of n elements.
struct Case {
  Case(std::size_t n, std::size_t offset, Kind kind, std::uint64_t seed)
      : num_elems(n),
        p(n, offset),
        mu(n, offset * 3 % 64),
        nu(n, offset * 5 % 64),
        grad(n, offset * 7 % 64),
        grad_half(n, offset * 9 % 64),
        weight(n, offset * 11 % 64),
        weight_half(n, offset * 13 % 64),
        sumsq(NumChunks(n), offset) {
    Random random(seed);
    for (std::size_t i = 0; i < n; ++i) {
      p.Set(i, Number(random, kind, 1.0f));
      mu.Set(i, Number(random, kind, 1e-2f));
      const float x = Number(random, kind, 1e-2f);
      // Only what is no number can make nu negative.
      nu.Set(i, kind == Kind::kUsual ? x * x : std::fabs(x));
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
  void* WeightData(WeightType type) {
    if (type == WeightType::kNone) return nullptr;
    if (type == WeightType::kFloat32) return weight.data();
    return weight_half.data();
  }

  void AddTo(Checksum& checksum) const {
    for (const auto* x : {&p, &mu, &nu, &grad, &weight}) x->AddTo(checksum);
    for (const auto* x : {&grad_half, &weight_half}) x->AddTo(checksum);
    sumsq.AddTo(checksum);
  }

  std::size_t num_elems;
  Guarded<float> p, mu, nu, grad;
  Guarded<std::uint16_t> grad_half;
  Guarded<float> weight;
  Guarded<std::uint16_t> weight_half;
  Guarded<double> sumsq;
};

// Calls run(case) for fixed cases of every kind: every short length, and those
// next to a chunk. Returns the checksum of what the cases are then.
template <class Run>
std::uint64_t ForEachCase(const Run& run) {
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 67; ++n) lengths.push_back(n);
  for (std::size_t n : {130, 1021, 4095, 4097}) lengths.push_back(n);
  Checksum checksum;
  std::uint64_t seed = 0;
  for (Kind kind : kKinds) {
    for (std::size_t n : lengths) {
      ++seed;
      Case x(n, seed * 2 % 64, kind, seed);
      run(x);
      x.AddTo(checksum);
    }
  }
  return checksum.value();
}

void Print(const std::string& operation, const KernelTable& kernels,
           std::uint64_t checksum) {
  std::printf("%s %s %u %016" PRIx64 "\n", operation.c_str(), kernels.isa,
              kernels.vector_bits, checksum);
}

const AdamParams kParams = {0.9f,  0.95f,  0.1f,   0.05f, 2.0f,
                            1e-9f, -1e-3f, -1e-4f, 1e-8f, 0.5f};

void PrintSteps(const KernelTable& kernels) {
  for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
    for (std::size_t weight = 0; weight < kNumWeightTypes; ++weight) {
      const std::uint64_t checksum = ForEachCase([&](Case& x) {
        kernels.adam_step[grad][weight](
            kParams,
            {x.p.data(), x.mu.data(), x.nu.data(),
             x.GradData(static_cast<GradType>(grad)),
             x.WeightData(static_cast<WeightType>(weight))},
            x.num_elems);
      });
      Print(std::string("adam_step/") + kTypeNames[grad] + "/" +
                kWeightNames[weight],
            kernels, checksum);
    }
  }
}

void PrintSums(const KernelTable& kernels, const char* name,
               const AccumulateFn (&functions)[kNumGradTypes]) {
  for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
    for (bool squares : {false, true}) {
      const std::uint64_t checksum = ForEachCase([&](Case& x) {
        functions[grad]({x.p.data(), x.GradData(static_cast<GradType>(grad)),
                         squares ? x.sumsq.data() : nullptr},
                        x.num_elems);
      });
      Print(std::string(name) + "/" + kTypeNames[grad] +
                (squares ? "/sumsq" : ""),
            kernels, checksum);
    }
  }
}

void PrintAll() {
  for (const KernelTable* kernels : AvailableKernels()) {
    PrintSteps(*kernels);
    PrintSums(*kernels, "widen", kernels->widen);
    PrintSums(*kernels, "accumulate", kernels->accumulate);
  }
}

}  // namespace
}  // namespace sojax

int main() {
  sojax::PrintAll();
  return 0;
}
