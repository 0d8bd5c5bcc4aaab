// Reads and writes the arrays of an AdamW step, with next to no arithmetic:
// the time that any such step takes at least. Compiled by stream.py on the
// machine that is measured and for it alone, so -march=native is fine here.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#define STREAM_INLINE inline __attribute__((always_inline))

// A cache line of 32-bit integers, and half a line of 16-bit ones.
using Line = std::int32_t __attribute__((vector_size(64)));
using HalfLine = std::int16_t __attribute__((vector_size(32)));

constexpr std::size_t kLineBytes = sizeof(Line);
// Elements of a block: two lines of float, one of bfloat16.
constexpr std::size_t kBlockElems = 32;
// What a thread takes at once: the largest piece of the library's kernels.
constexpr std::size_t kPieceElems = std::size_t{1} << 16;

// Which stores pass the caches. The numbers are those of stream.py.
enum class Stores { kOrdinary = 0, kNonTemporal = 1, kWeightsNonTemporal = 2 };

struct Arrays {
  float* p;
  float* mu;
  float* nu;
  const char* grad;       // float or bfloat16
  std::uint16_t* weight;  // bfloat16
};

// Writes to an address that is a multiple of the size, past the caches.
template <class Vector>
STREAM_INLINE void StoreNonTemporal(void* to, Vector x) {
  char* at = static_cast<char*>(to);
#if defined(__AVX512F__)
  if constexpr (sizeof(x) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at),
                        reinterpret_cast<__m512i>(x));
    return;
  }
#endif
#if defined(__AVX__)
  __m256i parts[sizeof(x) / 32];
  std::memcpy(parts, &x, sizeof(x));
  for (std::size_t i = 0; i < sizeof(x) / 32; ++i) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at) + i, parts[i]);
  }
#elif defined(__x86_64__)
  __m128i parts[sizeof(x) / 16];
  std::memcpy(parts, &x, sizeof(x));
  for (std::size_t i = 0; i < sizeof(x) / 16; ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at) + i, parts[i]);
  }
#elif defined(__aarch64__)
  using Part = std::int32_t __attribute__((vector_size(16)));
  Part parts[sizeof(x) / 16];
  std::memcpy(parts, &x, sizeof(x));
  for (std::size_t i = 0; i < sizeof(x) / 16; i += 2) {
    asm volatile("stnp %q0, %q1, [%2]"
                 :
                 : "w"(parts[i]), "w"(parts[i + 1]), "r"(at + 16 * i)
                 : "memory");
  }
#else
  std::memcpy(at, &x, sizeof(x));
#endif
}

STREAM_INLINE void Fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

STREAM_INLINE Line Load(const void* from) {
  Line x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <bool kNonTemporal, class Vector>
STREAM_INLINE void Store(void* to, Vector x) {
  if constexpr (kNonTemporal) {
    StoreNonTemporal(to, x);
  } else {
    std::memcpy(to, &x, sizeof(x));
  }
}

template <bool kPrefetch>
STREAM_INLINE void Prefetch(const void* start, std::size_t num_bytes,
                            std::size_t distance) {
  if constexpr (kPrefetch) {
    const auto address = reinterpret_cast<std::uintptr_t>(start) + distance;
    for (std::size_t i = 0; i < num_bytes; i += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(address + i), 0, 2);
    }
  }
}

// Goes through whole blocks of the elements begin..end-1. `zero` is 0, which
// the compiler cannot know: all that is read has to be read. What is written is
// what was there, with the bits of `flip` changed.
template <class Grad, Stores kStores, bool kPrefetch>
void StreamPiece(const Arrays& arrays, std::size_t begin, std::size_t end,
                 std::size_t prefetch_bytes, std::int32_t zero,
                 std::int32_t flip) {
  constexpr bool kHalf = sizeof(Grad) == 2;
  constexpr bool kState = kStores == Stores::kNonTemporal;
  constexpr bool kWeights = kStores != Stores::kOrdinary;
  constexpr std::size_t kGradLines = kBlockElems * sizeof(Grad) / kLineBytes;
  const Arrays a = arrays;
  for (std::size_t i = begin; i + kBlockElems <= end; i += kBlockElems) {
    const char* grad = a.grad + i * sizeof(Grad);
    for (const float* state : {a.p, a.mu, a.nu}) {
      Prefetch<kPrefetch>(state + i, kBlockElems * sizeof(float),
                          prefetch_bytes);
    }
    Prefetch<kPrefetch>(grad, kGradLines * kLineBytes, prefetch_bytes);
    for (std::size_t line = 0; line < 2; ++line) {
      const std::size_t at = i + line * (kBlockElems / 2);
      Line p = Load(a.p + at);
      if (line < kGradLines) p ^= Load(grad + line * kLineBytes) & zero;
      p ^= flip;
      Store<kState>(a.p + at, p);
      Store<kState>(a.mu + at, Load(a.mu + at) ^ flip);
      Store<kState>(a.nu + at, Load(a.nu + at) ^ flip);
      if constexpr (kHalf) {
        Store<kWeights>(a.weight + at,
                        __builtin_convertvector(p >> 16, HalfLine));
      }
    }
  }
  Fence();
}

using PieceFn = void (*)(const Arrays&, std::size_t, std::size_t, std::size_t,
                         std::int32_t, std::int32_t);

template <class Grad, bool kPrefetch>
PieceFn ChooseStores(Stores stores) {
  switch (stores) {
    case Stores::kOrdinary:
      return StreamPiece<Grad, Stores::kOrdinary, kPrefetch>;
    case Stores::kNonTemporal:
      return StreamPiece<Grad, Stores::kNonTemporal, kPrefetch>;
    case Stores::kWeightsNonTemporal:
      return StreamPiece<Grad, Stores::kWeightsNonTemporal, kPrefetch>;
  }
  return nullptr;
}

template <class Grad>
PieceFn ChoosePrefetch(Stores stores, bool prefetch) {
  return prefetch ? ChooseStores<Grad, true>(stores)
                  : ChooseStores<Grad, false>(stores);
}

}  // namespace

// Streams n elements on num_threads threads; of the last n % 32 nothing. All
// arrays start at multiples of 64 bytes. With weight == nullptr gradients are
// float, otherwise bfloat16. `zero` must be 0.
// With flip = 1 the last bit of all floats is changed, with 0 none.
extern "C" void StreamArrays(float* p, float* mu, float* nu, const void* grad,
                             std::uint16_t* weight, std::size_t n, int stores,
                             std::size_t prefetch_bytes,
                             std::size_t num_threads, std::int32_t zero,
                             std::int32_t flip) {
  const Arrays arrays{p, mu, nu, static_cast<const char*>(grad), weight};
  const PieceFn run =
      weight == nullptr ? ChoosePrefetch<float>(static_cast<Stores>(stores),
                                                prefetch_bytes != 0)
                        : ChoosePrefetch<std::uint16_t>(
                              static_cast<Stores>(stores), prefetch_bytes != 0);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (;;) {
      const std::size_t begin = next.fetch_add(kPieceElems);
      if (begin >= n) return;
      const std::size_t end = n - begin < kPieceElems ? n : begin + kPieceElems;
      run(arrays, begin, end, prefetch_bytes, zero, flip);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}
