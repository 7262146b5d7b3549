// One AdamW update in one pass over memory, equal to reference.py to the bit; see README.md.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;

// Elements computed at once; their results stay in the first-level cache until they are stored.
constexpr int64_t kChunk = 256;
// What a thread takes at a time; a multiple of the former.
constexpr int64_t kBlock = 65536;
constexpr int64_t kLine = 64;

struct Coefficients {
  float clip_factor, keep, weight1, beta2, weight2, correction, eps, step;
};

struct Buffers {
  alignas(kLine) float master[kChunk], exp_avg[kChunk], exp_avg_sq[kChunk];
  alignas(kLine) bf16 rounded[kChunk];
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even. Not the CPU's instruction, which takes subnormal numbers for zero.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<bf16>(is_nan ? 0x7fc0 : nearest);
}

template <class Gradient, bool kRound>
inline void compute(int64_t n, const float* __restrict p, const float* __restrict m,
                    const float* __restrict v, const Gradient* __restrict g,
                    Buffers& __restrict out, const Coefficients& c) {
  // torch.lerp takes the nearer end as its base.
  const bool from_old = std::fabs(c.weight1) < 0.5f;
  const float coefficient = from_old ? c.weight1 : c.weight1 - 1.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = widen(g[i]) * c.clip_factor;
    const float base = from_old ? m[i] : gradient;
    const float exp_avg = std::fma(coefficient, gradient - m[i], base);
    const float exp_avg_sq = std::fma(c.weight2 * gradient, gradient, v[i] * c.beta2);
    const float denominator = std::sqrt(exp_avg_sq) / c.correction + c.eps;
    const float master = p[i] * c.keep + c.step * exp_avg / denominator;
    out.master[i] = master;
    out.exp_avg[i] = exp_avg;
    out.exp_avg_sq[i] = exp_avg_sq;
    if (kRound) out.rounded[i] = narrow(master);
  }
}

// Store past the caches: an ordinary store would first read the line that it overwrites.
inline void store(void* target, const void* source, int64_t bytes) {
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  int64_t at = 0;
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    for (; at + kLine <= bytes; at += kLine) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_load_si512(from + at));
#else
      for (int64_t part = at; part < at + kLine; part += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + part),
                         _mm_load_si128(reinterpret_cast<const __m128i*>(from + part)));
#endif
    }
  }
#endif
  std::memcpy(to + at, from + at, bytes - at);
}

template <class Gradient, bool kRound>
void update(int64_t n, int threads, const float* p, const float* m, const float* v,
            const Gradient* g, float* new_p, float* new_m, float* new_v, bf16* rounded,
            const Coefficients& c) {
#pragma omp parallel num_threads(threads)
  {
    Buffers buffers;
    // Whoever is free takes the next block: a thread that lost its CPU holds up nobody.
#pragma omp for schedule(dynamic) nowait
    for (int64_t start = 0; start < n; start += kBlock) {
      const int64_t stop = std::min(n, start + kBlock);
      for (int64_t i = start; i < stop; i += kChunk) {
        const int64_t size = std::min(kChunk, stop - i);
        compute<Gradient, kRound>(size, p + i, m + i, v + i, g + i, buffers, c);
        store(new_p + i, buffers.master, size * sizeof(float));
        store(new_m + i, buffers.exp_avg, size * sizeof(float));
        store(new_v + i, buffers.exp_avg_sq, size * sizeof(float));
        if (kRound) store(rounded + i, buffers.rounded, size * sizeof(bf16));
      }
    }
#if defined(__SSE2__)
    // Streaming stores are in no order with later ones, and an arena's flip must come after them.
    _mm_sfence();
#endif
  }
}

template <class Gradient>
void choose(int64_t n, int threads, const float* p, const float* m, const float* v, const void* g,
            float* new_p, float* new_m, float* new_v, bf16* rounded, const Coefficients& c) {
  const auto* gradient = static_cast<const Gradient*>(g);
  if (rounded)
    update<Gradient, true>(n, threads, p, m, v, gradient, new_p, new_m, new_v, rounded, c);
  else
    update<Gradient, false>(n, threads, p, m, v, gradient, new_p, new_m, new_v, rounded, c);
}

}  // namespace

extern "C" void flatpeak_adamw(int64_t n, int threads, const float* master, const float* exp_avg,
                               const float* exp_avg_sq, const void* gradient, int gradient_is_bf16,
                               float* new_master, float* new_exp_avg, float* new_exp_avg_sq,
                               bf16* rounded, const Coefficients* coefficients) {
  const auto chosen = gradient_is_bf16 ? choose<bf16> : choose<float>;
  chosen(n, threads, master, exp_avg, exp_avg_sq, gradient, new_master, new_exp_avg,
         new_exp_avg_sq, rounded, *coefficients);
}
