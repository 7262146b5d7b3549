// Copy and triad with stores past the caches: what memory gives to a loop that does nothing else.

#include <algorithm>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLine = 16;  // floats
constexpr int64_t kBlock = 262144;

#if defined(__AVX512F__)
void store(float* to, const float* line) { _mm512_stream_ps(to, _mm512_load_ps(line)); }
#elif defined(__SSE2__)
void store(float* to, const float* line) {
  for (int64_t part = 0; part < kLine; part += 4)
    _mm_stream_ps(to + part, _mm_load_ps(line + part));
}
#else
void store(float* to, const float* line) { std::copy(line, line + kLine, to); }
#endif

template <class Line>
void each_line(int64_t n, int threads, float* to, Line line) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, kBlock / kLine) nowait
    for (int64_t at = 0; at < n; at += kLine) {
      alignas(64) float values[kLine];
      line(at, values);
      store(to + at, values);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }
}

}  // namespace

// All arrays are 64-byte aligned; n is a multiple of 16.
extern "C" void stream_copy(int64_t n, int threads, float* to, const float* a) {
  each_line(n, threads, to, [a](int64_t at, float* values) {
    for (int64_t j = 0; j < kLine; ++j) values[j] = a[at + j];
  });
}

extern "C" void stream_triad(int64_t n, int threads, float* to, const float* a, const float* b) {
  each_line(n, threads, to, [a, b](int64_t at, float* values) {
    for (int64_t j = 0; j < kLine; ++j) values[j] = a[at + j] + 3.0f * b[at + j];
  });
}
