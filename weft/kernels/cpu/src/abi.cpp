// The entry points: plain C functions that pass a call on to the level that the caller asks for.
#include "abi.h"
#include "block.h"
#include "threads.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace weft;

#define WEFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__x86_64__)
// Which register state the operating system saves (XCR0): instructions alone are not enough.
uint64_t saved_state() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

bool has_avx2() {
    unsigned a, b, c, d;
    if ((saved_state() & 0x6) != 0x6) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA) || !(c & bit_F16C)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) && (b & bit_BMI2);
}

bool has_avx512f() {
    unsigned a, b, c, d;
    if (!has_avx2() || (saved_state() & 0xe6) != 0xe6) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    return (b & needed) == needed;
}

bool has_avx512() {
    constexpr unsigned kBf16 = 1u << 5;
    unsigned a, b, c, d;
    return has_avx512f() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBf16);
}

// Dot products of bytes: VNNI with AVX-512, AVX-VNNI without.
bool has_vnni(int level) {
    constexpr unsigned kVnni = 1u << 11, kAvxVnni = 1u << 4;
    unsigned a, b, c, d;
    if (level == kAvx2) return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni);
    return level >= kAvx512f && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & kVnni);
}

// Byte permutations over two registers (VBMI).
bool has_byte_permutations() {
    constexpr unsigned kVbmi = 1u << 1;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & kVbmi);
}

bool has_amx() {
    constexpr unsigned kTile = 1u << 24, kTileBf16 = 1u << 22;
    unsigned a, b, c, d;
    // Tiles of quantized blocks are made by byte permutations, which every processor with AMX has.
    if (!has_avx512() || !has_byte_permutations() || (saved_state() & 0x60000) != 0x60000) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kTileBf16)) != (kTile | kTileBf16)) return false;
    // Linux hands out the tile registers on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

// From this many bytes on, a copy would push everything else out of the caches that a core has to itself.
constexpr int64_t kBeyondCaches = 4 << 20;

// A copy whose result is not read soon: a store past the caches does not fetch first what it overwrites, which is a
// third of the traffic. `finish_copies` comes before another thread reads it.
void copy_past_caches(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
    const int64_t head = -(uintptr_t)to & 63;
    if (head + 64 <= bytes) {
        std::memcpy(to, from, (size_t)head);
        to += head, from += head, bytes -= head;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i*)from), b = _mm_loadu_si128((const __m128i*)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i*)(from + 32)), d = _mm_loadu_si128((const __m128i*)(from + 48));
            _mm_stream_si128((__m128i*)to, a);
            _mm_stream_si128((__m128i*)(to + 16), b);
            _mm_stream_si128((__m128i*)(to + 32), c);
            _mm_stream_si128((__m128i*)(to + 48), d);
        }
    }
#endif
    std::memcpy(to, from, (size_t)bytes);
}

void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

const Table& table(int level) {
#if defined(__x86_64__)
    if (level == kAmx) return kAmxTable;
    if (level == kAvx512) return kAvx512Table;
    if (level == kAvx512f) return kAvx512fTable;
    if (level == kAvx2) return kAvx2Table;
#endif
    return kPortableTable;
}

}  // namespace

WEFT_EXPORT int weft_abi_version() { return kAbiVersion; }

// What `build.source_hash` said when the library was built.
WEFT_EXPORT const char* weft_source_hash() { return WEFT_SOURCE_HASH; }

WEFT_EXPORT int weft_has_level(int level) {
#if defined(__x86_64__)
    if (level == kAmx) return has_amx();
    if (level == kAvx512) return has_avx512();
    if (level == kAvx512f) return has_avx512f();
    if (level == kAvx2) return has_avx2();
#endif
    return level == kPortable;
}

// Whether this machine has instructions for dot products of bytes that go with a level.
WEFT_EXPORT int weft_has_vnni(int level) {
#if defined(__x86_64__)
    return has_vnni(level);
#else
    return 0;
#endif
}

WEFT_EXPORT void weft_rms_norm(int level, int dtype, const void* x, const void* weight, void* out, int64_t rows,
                               int64_t size, float eps, int threads) {
    table(level).rms_norm(dtype, x, weight, out, rows, size, eps, threads);
}

WEFT_EXPORT void weft_silu_mul(int level, int dtype, const void* gate_up, void* out, int64_t rows, int64_t size,
                               int threads) {
    table(level).silu_mul(dtype, gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_rotate_and_store(int level, int dtype, const Batch* batch, int64_t heads, int64_t kv_heads,
                                       int64_t head_dim, void* qkv, const float* cos, const float* sin,
                                       const void* q_weight, const void* k_weight, float eps, void* kv, int threads) {
    table(level).rotate_and_store(dtype, RotateArgs{batch, {heads, kv_heads, head_dim}, qkv, cos, sin, q_weight,
                                                    k_weight, eps, kv, threads});
}

WEFT_EXPORT void weft_linear(int level, int dtype, const void* x, const void* weight, const void* bias,
                             const void* residual, void* out, int64_t rows, int64_t inputs, int64_t outputs,
                             int threads) {
    table(level).linear(dtype, LinearArgs{x, weight, bias, residual, out, rows, inputs, outputs, threads, false, 0});
}

WEFT_EXPORT void weft_sample(int level, Sampler* samplers, int64_t count, int64_t vocab, const float* levels,
                             int threads) {
    table(level).sample(samplers, count, vocab, {levels[0], levels[1], levels[2], levels[3], levels[4]}, threads);
}

// Whether a level has products with packed weights.
WEFT_EXPORT int weft_packs(int level) { return table(level).linear_packed != nullptr; }

WEFT_EXPORT void weft_pack_weight(int level, int dtype, const void* weight, void* packed, int64_t outputs,
                                  int64_t inputs, int threads) {
    table(level).pack_weight(dtype, weight, packed, outputs, inputs, threads);
}

// Rows of a packed weight of floats or bfloat16, as they were before. In words of 4 bytes (a float, or a pair of
// bfloat16) every level packs alike: a step is two blocks of 16 outputs, and in a block the outputs lie side by side.
// Returns how many there were before the first index that the weight has no row for.
WEFT_EXPORT int64_t weft_take_rows(int dtype, const void* packed, const int64_t* indices, void* out, int64_t rows,
                                   int64_t inputs, int64_t outputs) {
    const int64_t words = dtype == kBfloat16 ? 16 : 32, steps = inputs / 32;  // words of an output in a step
    uint32_t* to = (uint32_t*)out;
    for (int64_t r = 0; r < rows; r++) {
        if (indices[r] < 0 || indices[r] >= outputs) return r;
        const int64_t panel = indices[r] / 32, block = indices[r] % 32 / 16, lane = indices[r] % 16;
        for (int64_t s = 0; s < steps; s++) {
            const uint32_t* from = (const uint32_t*)packed + ((panel * steps + s) * 2 + block) * words * 16 + lane;
            for (int64_t k = 0; k < words; k++) *to++ = from[k * 16];
        }
    }
    return rows;
}

// Pages from one pool to another, all layers in one call: page i of layer l is widths[l] bytes at
// from[l] + source[i] * from_strides[l], and goes to to[l] + destination[i] * to_strides[l]. Threads take parts of a
// page each, in the order in which a page's layers follow one another: that is how they lie in a host page.
WEFT_EXPORT void weft_move_pages(const void* const* from, void* const* to, const int64_t* from_strides,
                                 const int64_t* to_strides, const int64_t* widths, const int64_t* source,
                                 const int64_t* destination, int64_t layers, int64_t pages, int threads) {
    int64_t page_bytes = 0;
    for (int64_t l = 0; l < layers; l++) page_bytes += widths[l];
    const bool beyond_caches = pages * page_bytes >= kBeyondCaches;
    // One core copies what lies in its caches sooner than another one wakes up.
    on_threads(beyond_caches ? threads : 1, [&](int64_t member, int64_t members) {
        const int64_t end = pages * layers * (member + 1) / members;
        for (int64_t item = pages * layers * member / members; item < end; item++) {
            const int64_t i = item / layers, l = item % layers;
            char* target = (char*)to[l] + destination[i] * to_strides[l];
            const char* origin = (const char*)from[l] + source[i] * from_strides[l];
            if (beyond_caches)
                copy_past_caches(target, origin, widths[l]);
            else
                std::memcpy(target, origin, (size_t)widths[l]);
        }
        finish_copies();
    });
}

WEFT_EXPORT void weft_linear_packed(int level, int dtype, const void* x, const void* weight, const void* bias,
                                    const void* residual, void* out, int64_t rows, int64_t inputs, int64_t outputs,
                                    int gated, int threads) {
    table(level).linear_packed(
        dtype, LinearArgs{x, weight, bias, residual, out, rows, inputs, outputs, threads, gated != 0, 0});
}

WEFT_EXPORT void weft_attention(int level, int dtype, const Batch* batch, int64_t heads, int64_t kv_heads,
                                int64_t head_dim, const void* q, int64_t q_stride, const void* kv, void* out,
                                float scale, int64_t window, int threads) {
    table(level).attention(
        dtype, AttentionArgs{batch, {heads, kv_heads, head_dim}, q, q_stride, kv, out, scale, window, threads});
}

WEFT_EXPORT void weft_block(int level, int dtype, const BlockArgs* block, const PassArgs* pass, void* x, void* kv) {
    run_block(level, table(level), dtype, *block, *pass, x, kv);
}

WEFT_EXPORT double weft_probe_read(int level, const void* data, int64_t bytes, int threads) {
    return table(level).probe_read(data, bytes, threads);
}

WEFT_EXPORT double weft_probe_product(int level, int dtype, void* data, int64_t rounds, int threads) {
    return table(level).probe_product(dtype, data, rounds, threads);
}
