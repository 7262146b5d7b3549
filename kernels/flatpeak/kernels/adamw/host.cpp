// One AdamW update in one pass over memory, equal to reference.py to the bit; see README.md.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#define FLATPEAK_STREAMS 1
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;

// What a thread takes at a time.
constexpr int64_t kBlock = 262144;
// The parameters whose bf16 weights fill a line of the caches.
constexpr int64_t kLine = 32;

struct Coefficients {
  float clip_factor, keep, weight1, beta2, weight2, correction, eps, step;

  // torch.lerp takes the nearer end as its base.
  bool from_old() const { return std::fabs(weight1) < 0.5f; }
  float lerp() const { return from_old() ? weight1 : weight1 - 1.0f; }
};

// The new state may be the old one.
struct Bucket {
  const float *master, *exp_avg, *exp_avg_sq;
  const void* gradient;
  float *new_master, *new_exp_avg, *new_exp_avg_sq;
  bf16* weights;  // or null
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

template <class Gradient>
void update_each(int64_t start, int64_t stop, const Bucket& b, const Coefficients& c) {
  const auto* gradients = static_cast<const Gradient*>(b.gradient);
  const bool from_old = c.from_old(), round = b.weights;
  const float lerp = c.lerp();
#pragma omp simd
  for (int64_t i = start; i < stop; ++i) {
    const float gradient = widen(gradients[i]) * c.clip_factor;
    const float base = from_old ? b.exp_avg[i] : gradient;
    const float exp_avg = std::fma(lerp, gradient - b.exp_avg[i], base);
    const float exp_avg_sq =
        std::fma(c.weight2 * gradient, gradient, b.exp_avg_sq[i] * c.beta2);
    const float denominator = std::sqrt(exp_avg_sq) / c.correction + c.eps;
    const float master = b.master[i] * c.keep + c.step * exp_avg / denominator;
    b.new_master[i] = master;
    b.new_exp_avg[i] = exp_avg;
    b.new_exp_avg_sq[i] = exp_avg_sq;
    if (round) b.weights[i] = narrow(master);
  }
}

#ifdef FLATPEAK_STREAMS

#ifdef __AVX512F__

using Floats = __m512;
using Halves = __m256i;

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const bf16* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(halves));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats root(Floats x) { return _mm512_sqrt_ps(x); }
inline void stream(float* to, Floats x) { _mm512_stream_ps(to, x); }
inline void stream(bf16* to, Halves x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x);
}
inline Halves narrow(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(chosen);
}

#else

using Floats = __m256;
using Halves = __m128i;

inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load(const bf16* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats root(Floats x) { return _mm256_sqrt_ps(x); }
inline void stream(float* to, Floats x) { _mm256_stream_ps(to, x); }
inline void stream(bf16* to, Halves x) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), x); }
inline Halves narrow(Floats x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc0), is_nan);
  // Packing goes by 128-bit lanes: the quarters 0 and 2 hold the result.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
  return _mm256_castsi256_si128(packed);
}

#endif

constexpr int64_t kFloats = sizeof(Floats) / sizeof(float);

// As `update_each`, from the registers past the caches: an ordinary store would first read the
// line that it overwrites.
template <class Gradient, bool kRound>
void update_lines(int64_t start, int64_t stop, const Bucket& b, const Coefficients& c) {
  const auto* gradients = static_cast<const Gradient*>(b.gradient);
  const bool from_old = c.from_old();
  const Floats lerp = all(c.lerp()), clip_factor = all(c.clip_factor), keep = all(c.keep);
  const Floats beta2 = all(c.beta2), weight2 = all(c.weight2);
  const Floats correction = all(c.correction), eps = all(c.eps), step = all(c.step);
  for (int64_t line = start; line < stop; line += kLine) {
    for (int64_t i = line; i < line + kLine; i += kFloats) {
      const Floats gradient = mul(load(gradients + i), clip_factor);
      const Floats old_avg = load(b.exp_avg + i);
      const Floats exp_avg = fma(lerp, sub(gradient, old_avg), from_old ? old_avg : gradient);
      const Floats exp_avg_sq =
          fma(mul(weight2, gradient), gradient, mul(load(b.exp_avg_sq + i), beta2));
      const Floats denominator = add(div(root(exp_avg_sq), correction), eps);
      const Floats master =
          add(mul(load(b.master + i), keep), div(mul(step, exp_avg), denominator));
      stream(b.new_master + i, master);
      stream(b.new_exp_avg + i, exp_avg);
      stream(b.new_exp_avg_sq + i, exp_avg_sq);
      if (kRound) stream(b.weights + i, narrow(master));
    }
  }
}

bool can_stream(const Bucket& b) {
  const void* const targets[] = {b.new_master, b.new_exp_avg, b.new_exp_avg_sq, b.weights};
  for (const void* target : targets)
    if (reinterpret_cast<uintptr_t>(target) % sizeof(Floats)) return false;
  return true;
}

#endif

template <class Gradient>
void update_block(int64_t start, int64_t stop, const Bucket& b, const Coefficients& c) {
  int64_t rest = start;
#ifdef FLATPEAK_STREAMS
  if (can_stream(b)) {
    rest = stop - (stop - start) % kLine;
    if (b.weights)
      update_lines<Gradient, true>(start, rest, b, c);
    else
      update_lines<Gradient, false>(start, rest, b, c);
    // Streaming stores are in no order with later ones, and an arena's flip must come after them.
    _mm_sfence();
  }
#endif
  update_each<Gradient>(rest, stop, b, c);
}

template <class Gradient>
void update(int64_t n, int threads, const Bucket& b, const Coefficients& c) {
  // Whoever is free takes the next block: a thread that lost its CPU holds up nobody.
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t start = 0; start < n; start += kBlock)
    update_block<Gradient>(start, std::min(n, start + kBlock), b, c);
}

}  // namespace

extern "C" void flatpeak_adamw(int64_t n, int threads, const float* master, const float* exp_avg,
                               const float* exp_avg_sq, const void* gradient, int gradient_is_bf16,
                               float* new_master, float* new_exp_avg, float* new_exp_avg_sq,
                               bf16* weights, const Coefficients* coefficients) {
  const Bucket bucket{master,     exp_avg,     exp_avg_sq,     gradient,
                      new_master, new_exp_avg, new_exp_avg_sq, weights};
  (gradient_is_bf16 ? update<bf16> : update<float>)(n, threads, bucket, *coefficients);
}
