// From rows of logits to tokens: what sampling parameters do to a row, and the draw. The contracts are those of
// weft/worker/edits.py and weft/worker/drawing.py; a row's token depends on that row alone. float alone.
#pragma once

#include "memory.h"
#include "simd.h"
#include "threads.h"

namespace weft {
namespace {

// Weights of so many tokens are added up together, in double.
constexpr int64_t kSumBlock = 128;
constexpr float kInfinity = __builtin_inff();

WEFT_INLINE bool is_finite(float x) { return x - x == 0.0f; }

// Sums of floats in double.
struct DoubleSum {
#if WEFT_AVX512
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    WEFT_INLINE void add(vf v) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)));
    }
    WEFT_INLINE double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#elif WEFT_AVX2
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    WEFT_INLINE void add(vf v) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)));
    }
    WEFT_INLINE double total() const {
        const __m256d both = _mm256_add_pd(low, high);
        return (both[0] + both[1]) + (both[2] + both[3]);
    }
#else
    double lanes[W] = {};
    WEFT_INLINE void add(vf v) {
        for (int i = 0; i < W; i++) lanes[i] += (double)v[i];
    }
    WEFT_INLINE double total() const {
        double s = 0;
        for (int i = 0; i < W; i++) s += lanes[i];
        return s;
    }
#endif
};

// W values, or the fewer that are left; the others are `beyond`.
WEFT_INLINE vf load_some(const float* x, int64_t count, float beyond) {
    if (count >= W) return load(x);
    vf v = all(beyond);
    for (int64_t i = 0; i < count; i++) v[i] = x[i];
    return v;
}
WEFT_INLINE void store_some(float* to, vf v, int64_t count) {
    if (count >= W) return store(to, v);
    for (int64_t i = 0; i < count; i++) to[i] = v[i];
}

WEFT_INLINE bool any(vi lanes) {
#if WEFT_AVX512
    return _mm512_movepi32_mask((__m512i)lanes) != 0;
#elif WEFT_AVX2
    return _mm256_movemask_ps((__m256)lanes) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < W; i++) found |= lanes[i];
    return found != 0;
#endif
}

// Values with their token ids, in order of id. Both arrays have room for W more than are ever in them.
struct Tokens {
    float* values;
    int32_t* ids;
    int64_t count = 0;

    // Appends the lanes of v that are kept; lane 0 is token `id`.
    WEFT_INLINE void append(vf v, vi kept, int64_t id) {
#if WEFT_AVX512
        const __mmask16 mask = _mm512_movepi32_mask((__m512i)kept);
        const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(mask, (__m512)v));
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(iota, _mm512_set1_epi32((int)id))));
        count += __builtin_popcount(mask);
#else
        for (int i = 0; i < W; i++) {
            values[count] = v[i];
            ids[count] = (int32_t)(id + i);
            count -= kept[i];  // -1: kept
        }
#endif
    }

    template <class Keep>
    WEFT_INLINE void keep(const Keep& keep) {
        int64_t to = 0;
        for (int64_t i = 0; i < count; i++) {
            const float value = values[i];
            values[to] = value;
            ids[to] = ids[i];
            to += keep(value);
        }
        count = to;
    }
};

// Of values in descending order, the first ones whose masses come to `need`: all above `threshold`, and so many of
// those that equal it. At least one, and all if they do not come to as much.
struct Cut {
    float threshold;
    int64_t equal;
};

// A value's mass is itself or, if not Weighted, 1. Changes the order of `values`; `mass` is what lies above all of them.
template <bool Weighted>
Cut cut(float* values, int64_t count, double need, double mass = 0) {
    for (;;) {
        const float a = values[0], b = values[count / 2], c = values[count - 1];
        const float pivot = most(least(a, b), least(most(a, b), c));
        int64_t above = 0, next = 0, below = count;
        double heavier = 0;
        while (next < below) {
            const float value = values[next];
            if (value > pivot) {
                heavier += Weighted ? value : 1;
                values[next++] = values[above];
                values[above++] = value;
            } else if (value < pivot) {
                values[next] = values[--below];
                values[below] = value;
            } else {
                next++;
            }
        }
        const double each = Weighted ? pivot : 1, before = mass + heavier;
        if (above && before >= need) {
            count = above;
            continue;
        }
        const int64_t equal = below - above;
        for (int64_t i = 1; i <= equal; i++)
            if (before + (double)i * each >= need) return {pivot, i};
        if (below == count) return {pivot, equal};
        mass = before + (double)equal * each;
        values += below;
        count -= below;
    }
}

// The same of weights from 0 to 1, of which there may be many: sorted into drawers first, of which one is cut.
constexpr int kDrawerShift = 19;  // an exponent, and the four first bits after the point
constexpr int64_t kDrawers = (0x3f800000 >> kDrawerShift) + 1;

struct Drawer {
    double mass;
    int64_t count;
};

WEFT_INLINE int64_t drawer_of(float weight) {
    uint32_t bits;
    __builtin_memcpy(&bits, &weight, 4);
    return bits >> kDrawerShift;
}

Cut nucleus(const Tokens& weights, double need, Drawer* drawers, float* scratch) {
    for (int64_t i = 0; i < kDrawers; i++) drawers[i] = {0, 0};
    for (int64_t i = 0; i < weights.count; i++) {
        Drawer& drawer = drawers[drawer_of(weights.values[i])];
        drawer.mass += weights.values[i];
        drawer.count++;
    }
    double mass = 0;
    int64_t last = 0, chosen = kDrawers - 1;
    while (!drawers[last].count) last++;
    for (; chosen > last; mass += drawers[chosen--].mass)
        if (drawers[chosen].count && mass + drawers[chosen].mass >= need) break;
    int64_t count = 0;
    for (int64_t i = 0; i < weights.count; i++) {
        scratch[count] = weights.values[i];
        count += drawer_of(weights.values[i]) == chosen;
    }
    return cut<true>(scratch, count, need, mass);
}

// The largest value of a row and of each of its blocks, NaN aside.
struct Largest {
    float value = -kInfinity;
    bool nan = false;
};

// `copy`: null, or where the row is copied to.
WEFT_INLINE Largest largest_of(const float* x, int64_t size, float* blocks, float* copy) {
    Largest found;
    for (int64_t first = 0, block = 0; first < size; first += kSumBlock, block++) {
        const int64_t end = least(first + kSumBlock, size);
        vf top = all(-kInfinity);
        vi unordered{};
        for (int64_t i = first; i < end; i += W) {
            const vf v = load_some(x + i, end - i, -kInfinity);
            if (copy) store_some(copy + i, v, end - i);
            top = larger(v, top);
            unordered |= v != v;
        }
        const float here = maximum(top);
        blocks[block] = here;
        found.value = most(found.value, here);
        found.nan |= any(unordered);
    }
    return found;
}

// The first of the largest.
WEFT_INLINE int64_t argmax_of(const float* x, int64_t size, const float* blocks, float largest) {
    int64_t block = 0;
    while (blocks[block] != largest) block++;
    int64_t token = block * kSumBlock;
    while (token < size - 1 && x[token] != largest) token++;
    return token;
}

// What is below the smallest weight becomes exactly zero, and to what is well above it the subtraction makes no
// difference.
struct Weigh {
    float largest, temperature, smallest, floor;
    Weigh(float largest, float temperature, float smallest)
        : largest(largest), temperature(temperature), smallest(smallest), floor(exponential(smallest)) {}
    WEFT_INLINE vf operator()(vf x) const {
        return exponential(larger((x - largest) / temperature, all(smallest))) - floor;
    }
};

// Everything that a token takes, for rows of one size.
struct DrawScratch {
    float *row, *blocks, *block_weights, *values, *others;
    double* ends;
    int32_t* ids;
    Drawer* drawers;

    DrawScratch(Memory& memory, int64_t size) {
        const int64_t room = size + 2 * W, num_blocks = (size + kSumBlock - 1) / kSumBlock + W;
        char* at = (char*)memory.at_least(
            (size_t)(num_blocks * (2 * 4 + 8) + room * 4 * 4 + kDrawers * (int64_t)sizeof(Drawer) + 64));
        ends = (double*)at, at += num_blocks * 8;
        drawers = (Drawer*)at, at += kDrawers * (int64_t)sizeof(Drawer);
        blocks = (float*)at, at += num_blocks * 4;
        block_weights = (float*)at, at += num_blocks * 4;
        values = (float*)at, at += room * 4;
        others = (float*)at, at += room * 4;
        row = (float*)at, at += room * 4;
        ids = (int32_t*)at;
    }
};

// The running sum of the weights at the end of each block; weights below `least_weight` count as zero.
double block_ends(const float* x, int64_t size, const Weigh& weigh, float least_weight, const DrawScratch& scratch) {
    double running = 0;
    for (int64_t first = 0, block = 0; first < size; first += kSumBlock, block++) {
        if (scratch.block_weights[block] > 0) {
            const int64_t end = least(first + kSumBlock, size);
            DoubleSum sum;
            for (int64_t i = first; i < end; i += W) {
                const vf w = weigh(load_some(x + i, end - i, -kInfinity));
                sum.add(w < least_weight ? vf{} : w);
            }
            running += sum.total();
        }
        scratch.ends[block] = running;
    }
    return running;
}

// The first token at which the running sum of weights exceeds `target`; the last one that has weight, if none does.
WEFT_INLINE int64_t walk(const float* weights, int64_t count, double running, double target) {
    int64_t last = 0;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += weights[i];
        if (weights[i] > 0) last = i;
        if (running + sum > target) return i;
    }
    return last;
}

// The `top_k` largest values; ties go to the lowest ids.
Tokens largest_tokens(const float* x, int64_t size, int64_t top_k, const DrawScratch& scratch) {
    const int64_t num_blocks = (size + kSumBlock - 1) / kSumBlock;
    float bound = -kInfinity;
    if (top_k < num_blocks) {  // as many blocks have a value that is as large, so the k-th of all values is
        __builtin_memcpy(scratch.others, scratch.blocks, (size_t)num_blocks * 4);
        bound = cut<false>(scratch.others, num_blocks, (double)top_k).threshold;
    }
    Tokens found{scratch.values, scratch.ids};
    for (int64_t block = 0; block < num_blocks; block++) {
        if (scratch.blocks[block] < bound) continue;
        const int64_t end = least((block + 1) * kSumBlock, size);
        for (int64_t i = block * kSumBlock; i < end; i += W) {
            const vf v = load_some(x + i, end - i, __builtin_nanf(""));
            const vi kept = v >= bound;
            if (any(kept)) found.append(v, kept, i);
        }
    }
    __builtin_memcpy(scratch.others, found.values, (size_t)found.count * 4);
    Cut kept = cut<false>(scratch.others, found.count, (double)top_k);
    found.keep([&](float value) { return value > kept.threshold || (value == kept.threshold && kept.equal-- > 0); });
    return found;
}

// All tokens that weigh as much as `least_weight`, with their weights.
Tokens heavy_tokens(const float* x, int64_t size, const Weigh& weigh, float least_weight, const DrawScratch& scratch) {
    Tokens found{scratch.values, scratch.ids};
    for (int64_t first = 0, block = 0; first < size; first += kSumBlock, block++) {
        if (scratch.block_weights[block] < 0.999f * least_weight) continue;
        const int64_t end = least(first + kSumBlock, size);
        for (int64_t i = first; i < end; i += W) {
            const vf w = weigh(load_some(x + i, end - i, -kInfinity));
            const vi kept = (w >= least_weight) & (w > 0.0f);
            if (any(kept)) found.append(w, kept, i);
        }
    }
    return found;
}

// A token of a row; the largest of its blocks are in `scratch.blocks`. Where edits have made the largest infinite, or a
// temperature is zero as a float, no weight would be a number.
int64_t draw_token(const float* x, int64_t size, const Sampler& how, Largest largest, float smallest,
                   const DrawScratch& scratch) {
    const float temperature = (float)how.temperature;
    if (temperature == 0 || largest.nan || !is_finite(largest.value))
        return argmax_of(x, size, scratch.blocks, largest.value);
    const Weigh weigh(largest.value, temperature, smallest);
    const int64_t num_blocks = (size + kSumBlock - 1) / kSumBlock;
    const float min_p = (float)how.min_p;
    if (!how.top_k)
        for (int64_t i = 0; i < num_blocks; i += W)
            store_some(scratch.block_weights + i, weigh(load_some(scratch.blocks + i, num_blocks - i, 0)), num_blocks - i);
    if (!how.top_k && how.top_p >= 1) {
        const double target = how.uniform * block_ends(x, size, weigh, min_p, scratch);
        int64_t block = 0;
        while (block < num_blocks - 1 && scratch.ends[block] <= target) block++;
        const int64_t first = block * kSumBlock, count = least(kSumBlock, size - first);
        alignas(64) float weights[kSumBlock];
        for (int64_t i = 0; i < count; i += W) {
            const vf w = weigh(load_some(x + first + i, count - i, -kInfinity));
            store(weights + i, w < min_p ? vf{} : w);
        }
        return first + walk(weights, count, block ? scratch.ends[block - 1] : 0, target);
    }
    double total = 0;
    Tokens kept{scratch.values, scratch.ids};
    if (how.top_k) {
        kept = largest_tokens(x, size, how.top_k, scratch);
        DoubleSum sum;
        for (int64_t i = 0; i < kept.count; i += W) {
            const vf w = weigh(load_some(kept.values + i, kept.count - i, -kInfinity));
            store_some(kept.values + i, w, kept.count - i);
            sum.add(w);
        }
        total = sum.total();
    } else {
        total = block_ends(x, size, weigh, 0, scratch);
        // All tokens lighter than this weigh less than 1 - p together, so none of them is in the nucleus; the margin is
        // for rounding.
        kept = heavy_tokens(x, size, weigh, (float)(0.999 * (1 - how.top_p) * total / (double)size), scratch);
    }
    if (how.top_p < 1) {
        Cut inside = nucleus(kept, how.top_p * total, scratch.drawers, scratch.others);
        kept.keep([&](float w) { return w > inside.threshold || (w == inside.threshold && inside.equal-- > 0); });
    }
    if (min_p > 0) kept.keep([&](float w) { return w >= min_p; });
    total = 0;
    for (int64_t i = 0; i < kept.count; i++) total += kept.values[i];
    return kept.ids[walk(kept.values, kept.count, 0, how.uniform * total)];
}

// On the tokens that were seen, which are few.
void penalize(float* x, int64_t size, const Sampler& how) {
    const float repetition = (float)how.repetition;
    for (int64_t first = 0; first < size; first += W) {
        const int64_t end = least(first + W, size);
        int32_t seen = 0;
        for (int64_t i = first; i < end; i++) seen |= how.counts[i];
        if (!seen) continue;
        for (int64_t i = first; i < end; i++) {
            if (!how.counts[i]) continue;
            const int32_t outputs = how.counts[i] >> 1;
            x[i] = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
            x[i] -= (float)(how.frequency * outputs + how.presence * (outputs > 0));
        }
    }
}

void mask(float* x, int64_t size, const Sampler& how, const SamplingLevels& levels) {
    constexpr float kMost = 3.402823466e38f;
    for (int64_t i = 0; i < size; i += W) {
        const int64_t count = size - i;
        vf v = load_some(x + i, count, 0);
        v = v >= -kMost ? v : all(levels.floor);
        if (how.allowed) {
            vb flags{};
            __builtin_memcpy(&flags, how.allowed + i, (size_t)least<int64_t>(W, count));
            v = __builtin_convertvector(flags, vi) != 0 ? v : all(levels.not_allowed);
        }
        if (how.late) v = lanes_of(how.late[i / 32] >> (i % 32)) ? v : all(levels.late_masked);
        store_some(x + i, v, count);
    }
    for (int64_t i = 0; i < how.num_bans; i++) x[how.bans[i]] = least(x[how.bans[i]], levels.banned);
}

int64_t sample_token(const Sampler& how, int64_t size, const SamplingLevels& levels, const DrawScratch& scratch) {
    const bool masked = how.num_bans || how.allowed || how.late;
    const bool edited = masked || how.num_bias || how.counts;
    Largest largest = largest_of(how.logits, size, scratch.blocks, edited ? scratch.row : nullptr);
    if (largest.nan || !is_finite(largest.value)) return -1;
    if (!edited) return draw_token(how.logits, size, how, largest, levels.smallest, scratch);
    float* x = scratch.row;
    for (int64_t i = 0; i < how.num_bias; i++) x[how.bias_ids[i]] += (float)how.bias[i];
    if (how.counts) penalize(x, size, how);
    // Last, so that bias and penalties do not move the levels.
    if (masked) mask(x, size, how, levels);
    largest = largest_of(x, size, scratch.blocks, nullptr);
    return draw_token(x, size, how, largest, levels.smallest, scratch);
}

void sample(Sampler* samplers, int64_t count, int64_t size, const SamplingLevels& levels, int threads) {
    const int64_t members = least<int64_t>(threads_for(count * size, threads), count);
    for_each_when_free(members, count, 1, [&](int64_t i) {
        static thread_local Memory memory;
        samplers[i].token = sample_token(samplers[i], size, levels, DrawScratch(memory, size));
    });
}

}  // namespace
}  // namespace weft
