// Probabilities from logits, and tokens drawn from them. Each distribution is computed by one thread in
// a fixed order, so its bits do not depend on the others of the batch.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "vectors.h"

// Logits further below the largest one than this get probability 0, -INFINITY included.
constexpr float LEAST_EXPONENT = -87.0f;
constexpr int64_t NUM_SUMMED = 512;  // numbers that are summed in float32

// Apply `function(start, lanes)` to vectors of 16 that cover the numbers from `start` to `end`, the last in part.
template <class Function>
inline void for_each_vector(int64_t start, int64_t end, Function function) {
    for (; start + 16 <= end; start += 16) function(start, lanes(16));
    if (start < end) function(start, lanes(end - start));
}

// The sum of `function(start, lanes)` over vectors of 16 that cover `width` numbers; of long rows in float64.
template <class Function>
inline double sum_over(int64_t width, Function function) {
    double total = 0;
    for (int64_t start = 0; start < width; start += NUM_SUMMED) {
        Floats sum = zeros();
        for_each_vector(start, std::min(start + NUM_SUMMED, width),
                        [&](int64_t i, Lanes part) { sum = sum + keep(part, function(i, part), zeros()); });
        total += sum_of(sum);
    }
    return total;
}

// NaN if one of the numbers is.
inline float largest_in(const float* from, int64_t width) {
    Floats maxima = all(-INFINITY);
    bool is_defined = true;
    for_each_vector(0, width, [&](int64_t i, Lanes part) {
        const Floats numbers = keep(part, load(from + i, part), maxima);
        is_defined &= !has_nan(numbers);
        maxima = largest(maxima, numbers);
    });
    return is_defined ? largest_of(maxima) : NAN;
}

struct Scored {
    float logit;
    int64_t token;
};

// The largest of some logits and its place, the first among equals; the first NaN if there is one.
inline Scored most_likely(const float* logits, int64_t width) {
    Scored found{-INFINITY, 0};
    int64_t first = 0;
    for (int64_t start = 0; start < width && !std::isnan(found.logit); start += NUM_SUMMED) {
        const float each = largest_in(logits + start, std::min(NUM_SUMMED, width - start));
        if (!(each <= found.logit)) found.logit = each, first = start;
    }
    const auto is_found = [&](float each) { return each == found.logit || std::isnan(each); };
    found.token = std::find_if(logits + first, logits + width, is_found) - logits;
    return found;
}

// The sum of numbers in float64.
inline double sum_of_block(const float* from, int64_t count) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += from[i + lane];
    for (; i < count; i++) sums[0] += from[i];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

inline uint64_t mixed(uint64_t value) {  // the finaliser of SplitMix64, without its first addition
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

inline bool comes_first(const Scored& one, const Scored& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

// Append the logits of at least `least` in the places from `start` to `end`.
inline void collect_from(float least, const float* from, int64_t start, int64_t end, std::vector<Scored>& found) {
    constexpr int64_t PIECE = 64;  // most pieces have none
    for (; start < end; start += PIECE) {
        const int64_t stop = std::min(start + PIECE, end);
        if (!(largest_in(from + start, stop - start) >= least)) continue;
        for (int64_t i = start; i < stop; i++)
            if (from[i] >= least) found.push_back({from[i], i});
    }
}

// The `count` largest finite logits, and those equal to the last of them, in any order.
inline void collect_largest(const float* from, int64_t width, int64_t count, std::vector<Scored>& found) {
    float least = -FLT_MAX;
    size_t limit = 2 * count + NUM_SUMMED;
    const auto reduce = [&] {
        if (found.size() <= (size_t)count) return;
        std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), comes_first);
        least = found[count - 1].logit;
        found.erase(std::remove_if(found.begin(), found.end(), [&](const Scored& each) { return each.logit < least; }), found.end());
        limit = 2 * found.size() + NUM_SUMMED;
    };
    for (int64_t start = 0; start < width; start += NUM_SUMMED) {
        collect_from(least, from, start, std::min(start + NUM_SUMMED, width), found);
        if (found.size() > limit) reduce();
    }
    reduce();
}

// 1 + bits / 2^52, for less than 2^52.
inline double between_1_and_2(uint64_t bits) {
    bits |= 0x3FF0000000000000u;
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

#pragma GCC visibility push(default)
extern "C" {
// The largest of each row of `width` logits, the first among equals, and its softmax, 0 if it is not
// finite. Rows are `stride` numbers apart.
void secondguess_most_likely(const float* logits, int64_t num_rows, int64_t width, int64_t stride, int64_t* tokens,
                             double* confidences) {
    for (int64_t row = 0; row < num_rows; row++) {
        const float* from = logits + row * stride;
        const Scored found = most_likely(from, width);
        tokens[row] = found.token;
        const double total = sum_over(width, [&](int64_t i, Lanes part) { return exponential(load(from + i, part) - all(found.logit)); });
        confidences[row] = std::isfinite(found.logit) ? 1 / total : 0;
    }
}

// softmax(logits / temperature) without what is further below the largest than `log_min_p`, for rows of
// `width` logits that are `stride` numbers apart; NaN in all places if the largest is not finite.
void secondguess_softmax(const float* logits, int64_t num_rows, int64_t width, int64_t stride, float temperature, float log_min_p,
                         float* probs) {
    const float least = std::max(log_min_p, LEAST_EXPONENT);
    for (int64_t row = 0; row < num_rows; row++) {
        const float* from = logits + row * stride;
        float* to = probs + row * width;
        const float maximum = largest_in(from, width);
        const double total = sum_over(width, [&](int64_t i, Lanes part) {
            const Floats below = (load(from + i, part) - all(maximum)) * all(1 / temperature);
            const Floats power = zero_where_less(exponential(below), below, least);
            store(to + i, power, part);
            return power;
        });
        const Floats factor = all(std::isfinite(maximum) ? 1 / total : NAN);
        for_each_vector(0, width, [&](int64_t i, Lanes part) { store(to + i, load(to + i, part) * factor, part); });
    }
}

// As `secondguess_softmax`, restricted first to the `top_k` largest logits (0 for all) and those equal to
// the last of them, then to the fewest largest that reach `top_p`. Returns 0 on success, 1 if memory
// could not be allocated.
int secondguess_truncated_softmax(const float* logits, int64_t num_rows, int64_t width, int64_t stride, double temperature,
                                  int64_t top_k, double top_p, double log_min_p, float* probs) {
    try {
        std::vector<Scored> found;
        for (int64_t row = 0; row < num_rows; row++) {
            const float* from = logits + row * stride;
            float* to = probs + row * width;
            const float maximum = largest_in(from, width);
            std::fill(to, to + width, std::isfinite(maximum) ? 0 : NAN);
            if (!std::isfinite(maximum)) continue;
            double mass = 0;
            found.clear();
            if (top_k) {
                collect_largest(from, width, top_k, found);
                for (const Scored& each : found) mass += std::exp((each.logit - (double)maximum) / temperature);
            } else {
                const Floats scale = all((float)(1 / temperature));
                mass = sum_over(width, [&](int64_t i, Lanes part) {
                    const Floats below = (load(from + i, part) - all(maximum)) * scale;
                    return zero_where_less(exponential(below), below, LEAST_EXPONENT);
                });
                // All logits below this one together have less than 1 - top_p.
                const double least = maximum + temperature * std::log(mass * (1 - top_p) / (2 * width));
                collect_from((float)std::max(least, -(double)FLT_MAX), from, 0, width, found);
            }
            std::sort(found.begin(), found.end(), comes_first);
            double before = 0;
            size_t kept = 0;
            for (; kept < found.size(); kept++) {
                const double below = (found[kept].logit - (double)maximum) / temperature;
                if (before >= top_p * mass || below < log_min_p) break;
                before += std::exp(below);
            }
            for (size_t i = 0; i < kept; i++)
                to[found[i].token] = std::exp((found[i].logit - (double)maximum) / temperature) / before;
        }
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

// The first place whose running sum exceeds `uniform`, in [0, 1), times the sum of all `width` weights;
// its weight is positive.
int64_t secondguess_draw(const float* weights, int64_t width, double uniform) {
    double total = 0;
    for (int64_t start = 0; start < width; start += NUM_SUMMED) total += sum_of_block(weights + start, std::min(NUM_SUMMED, width - start));
    const double wanted = uniform * total;
    double before = 0;
    int64_t found = 0;
    for (int64_t start = 0; start < width; start += NUM_SUMMED) {
        const int64_t end = std::min(start + NUM_SUMMED, width);
        const double after = before + sum_of_block(weights + start, end - start);
        if (after > wanted) {
            // The running sum is rounded differently, so it may end before `wanted`.
            for (int64_t i = start; i < end && before <= wanted; i++) {
                if (weights[i] > 0) found = i;
                before += weights[i];
            }
            return found;
        }
        before = after;
    }
    return found;
}

// The place v of the least -log(u_v) / weights[v], the first among equals, where u_v is the uniform of
// token v: the one that arrives first if v waits an exponential time of rate weights[v]. With `ids` [width],
// the uniform is that of token ids[v].
int64_t secondguess_race(const float* weights, int64_t width, uint64_t hash, const int64_t* ids) {
    double uniforms[NUM_SUMMED], least = INFINITY;
    int64_t found = 0;
    const auto uniform_of_token = [&](int64_t token) {
        const uint64_t bits = mixed(hash + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u) >> 12;
        return between_1_and_2(bits) - 1 + 0x1p-53;
    };
    for (int64_t start = 0; start < width; start += NUM_SUMMED) {
        const int64_t count = std::min(NUM_SUMMED, width - start);
        if (ids)
            for (int64_t i = 0; i < count; i++) uniforms[i] = uniform_of_token(ids[start + i]);
        else
            for (int64_t i = 0; i < count; i++) uniforms[i] = uniform_of_token(start + i);
        for (int64_t i = 0; i < count; i++) {
            const double weight = weights[start + i];
            // -log(u) >= 1 - u: few logarithms are needed. The factor covers their rounding.
            if (!(weight > 0) || 1 - uniforms[i] > least * weight * (1 + 1e-12)) continue;
            const double time = -std::log(uniforms[i]) / weight;
            if (time < least) least = time, found = start + i;
        }
    }
    return found;
}

// The sum of the residual max(factor * p - q, 0), which is written to `residual` unless that is null.
double secondguess_residual(float factor, const float* p, const float* q, int64_t width, float* residual) {
    return sum_over(width, [&](int64_t i, Lanes part) {
        const Floats left = largest(all(factor) * load(p + i, part) - load(q + i, part), zeros());
        if (residual) store(residual + i, left, part);
        return left;
    });
}
}
#pragma GCC visibility pop

// Sampling settings of a row: those of `secondguess_truncated_softmax`, or only temperature and `log_min_p`.
struct Settings {
    double temperature;              // 0: the most likely token
    int64_t is_truncated, top_k;
    double top_p, log_min_p;
};

// Write the probabilities of some rows of `width` logits; returns false if there is no memory.
inline bool write_probs(const Settings& settings, const float* logits, int64_t num_rows, int64_t width, int64_t stride, float* probs) {
    if (settings.is_truncated)
        return !secondguess_truncated_softmax(logits, num_rows, width, stride, settings.temperature, settings.top_k, settings.top_p,
                                              settings.log_min_p, probs);
    secondguess_softmax(logits, num_rows, width, stride, settings.temperature, settings.log_min_p, probs);
    return true;
}

// Random numbers of a row, which `sampling/noise.py` defines.
struct RowNoise {
    uint64_t key;
    int64_t position;                // at which the round begins
    int64_t races;                   // draft tokens are drawn by races
};
enum Purpose { DRAFT = 1, RACE = 4, ROUND = 5, NUM_PURPOSES = 5 };  // of drafts; `hashes.py` has all

inline uint64_t hash_of(uint64_t key, int64_t index, Purpose purpose) {
    const uint64_t step = 0x9E3779B97F4A7C15u;
    return mixed((key ^ mixed((uint64_t)(index * NUM_PURPOSES + purpose) + step)) + step);
}

inline double uniform_of(const RowNoise& noise, int64_t index, Purpose purpose) {
    return ((hash_of(hash_of(noise.key, noise.position, ROUND), index, purpose) >> 12) + 0.5) * 0x1p-52;
}
