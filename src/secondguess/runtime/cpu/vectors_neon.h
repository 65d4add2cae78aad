// Vector operations for ARM's NEON: a vector of 16 is four registers of 4.
#pragma once

struct Floats {
    float32x4_t part[4];
};
struct Halves {
    uint16x4_t part[4];  // 16 numbers in bfloat16
};

// Call a function for each register of a vector.
template <class Function>
[[gnu::always_inline]] inline Floats for_parts(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

inline Floats operator+(Floats a, Floats b) { return for_parts([&](int i) { return vaddq_f32(a.part[i], b.part[i]); }); }
inline Floats operator-(Floats a, Floats b) { return for_parts([&](int i) { return vsubq_f32(a.part[i], b.part[i]); }); }
inline Floats operator*(Floats a, Floats b) { return for_parts([&](int i) { return vmulq_f32(a.part[i], b.part[i]); }); }
inline Floats operator/(Floats a, Floats b) { return for_parts([&](int i) { return vdivq_f32(a.part[i], b.part[i]); }); }

inline Floats all(float number) { return for_parts([&](int) { return vdupq_n_f32(number); }); }

inline Floats widen(Halves halves) {
    return for_parts([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(halves.part[i], 16)); });
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline uint16x4_t narrow(float32x4_t numbers) {
    const uint32x4_t bits = vreinterpretq_u32_f32(numbers);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(numbers, numbers), near, quiet), 16);
}
inline Halves narrow(Floats numbers) {
    return {{narrow(numbers.part[0]), narrow(numbers.part[1]), narrow(numbers.part[2]), narrow(numbers.part[3])}};
}

inline Floats load(const bf16* from) {
    return widen(Halves{{vld1_u16(from), vld1_u16(from + 4), vld1_u16(from + 8), vld1_u16(from + 12)}});
}
inline Floats load(const float* from) { return for_parts([&](int i) { return vld1q_f32(from + 4 * i); }); }
inline void store(bf16* to, Floats numbers) {
    const Halves halves = narrow(numbers);
    for (int i = 0; i < 4; i++) vst1_u16(to + 4 * i, halves.part[i]);
}
inline void store(float* to, Floats numbers) {
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, numbers.part[i]);
}

// sum + a * b, and sum - a * b, rounded once.
inline Floats add_product(Floats sum, Floats a, Floats b) {
    return for_parts([&](int i) { return vfmaq_f32(sum.part[i], a.part[i], b.part[i]); });
}
inline Floats subtract_product(Floats sum, Floats a, Floats b) {
    return for_parts([&](int i) { return vfmsq_f32(sum.part[i], a.part[i], b.part[i]); });
}

// As on x86, the second number if one of the two is NaN.
inline float32x4_t largest(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats largest(Floats a, Floats b) { return for_parts([&](int i) { return largest(a.part[i], b.part[i]); }); }
inline Floats smallest(Floats a, Floats b) {
    return for_parts([&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]); });
}
inline Floats absolute(Floats x) { return for_parts([&](int i) { return vabsq_f32(x.part[i]); }); }
inline Floats nearest_whole(Floats x) { return for_parts([&](int i) { return vrndnq_f32(x.part[i]); }); }

// x * 2^whole, for exponents of normal float32 numbers.
inline Floats times_power_of_two(Floats x, Floats whole) {
    return x * for_parts([&](int i) {
        const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(whole.part[i]), vdupq_n_s32(127));
        return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    });
}

// The first `count` lanes of `numbers`, and the others of `otherwise`.
inline Floats first_lanes(long count, Floats numbers, Floats otherwise) {
    const int32x4_t places = {0, 1, 2, 3};
    return for_parts([&](int i) {
        const uint32x4_t kept = vcgtq_s32(vdupq_n_s32((int)count - 4 * i), places);
        return vbslq_f32(kept, numbers.part[i], otherwise.part[i]);
    });
}

// `numbers`, and 0 in the lanes in which `x` is less than `limit`.
inline Floats zero_where_less(Floats numbers, Floats x, float limit) {
    return for_parts([&](int i) {
        const uint32x4_t less = vcltq_f32(x.part[i], vdupq_n_f32(limit));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(numbers.part[i]), less));
    });
}

// `if_less` in the lanes in which a < b, and `otherwise` in the others.
inline Floats where_less(Floats a, Floats b, Floats if_less, Floats otherwise) {
    return for_parts([&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), if_less.part[i], otherwise.part[i]); });
}
inline bool has_nan(Floats x) {
    uint32x4_t defined = vceqq_f32(x.part[0], x.part[0]);
    for (int i = 1; i < 4; i++) defined = vandq_u32(defined, vceqq_f32(x.part[i], x.part[i]));
    return vminvq_u32(defined) == 0;
}

// The order of both is that of AVX2.
inline float sum_of(Floats x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest_of(Floats x) {
    const float32x4_t four = largest(largest(x.part[0], x.part[2]), largest(x.part[1], x.part[3]));
    const float32x4_t two = largest(four, vextq_f32(four, four, 2));
    const float a = vgetq_lane_f32(two, 0), b = vgetq_lane_f32(two, 1);
    return a > b ? a : b;
}

// Store the sum of each of four vectors, added in the order of AVX2.
inline void store_four_sums(float* to, const Floats four[4]) {
    const auto sums_of_half = [&](int half) {
        const auto eight = [&](int i) { return vaddq_f32(four[i].part[half], four[i].part[half + 2]); };
        return vpaddq_f32(vpaddq_f32(eight(0), eight(1)), vpaddq_f32(eight(2), eight(3)));
    };
    vst1q_f32(to, vaddq_f32(sums_of_half(0), sums_of_half(1)));
}

// Store the nearest integers as 8-bit numbers.
inline void store_small(int8_t* to, Floats numbers) {
    const auto eight = [&](int i) {
        const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(numbers.part[i])), high = vqmovn_s32(vcvtnq_s32_f32(numbers.part[i + 1]));
        return vqmovn_s16(vcombine_s16(low, high));
    };
    vst1q_s8(to, vcombine_s8(eight(0), eight(2)));
}

inline Floats load_small(const int8_t* from) {
    const int8x16_t numbers = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(numbers)), high = vmovl_s8(vget_high_s8(numbers));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

// Numbers in float16.
inline float32x4_t from_halves(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
inline Floats load_halves(const uint16_t* from) {
    return for_parts([&](int i) { return from_halves(vld1_u16(from + 4 * i)); });
}
inline void store_halves(uint16_t* to, Floats numbers) {
    for (int i = 0; i < 4; i++) vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(numbers.part[i])));
}

// 64 bytes: a pair of bfloat16, or 4 numbers of 8 bits, per lane.
struct Line {
    uint32x4_t part[4];
};
inline Line load_line(const void* from) {
    const uint32_t* numbers = (const uint32_t*)from;
    return {{vld1q_u32(numbers), vld1q_u32(numbers + 4), vld1q_u32(numbers + 8), vld1q_u32(numbers + 12)}};
}
inline Line repeat(const void* four_bytes) {
    uint32_t bits;
    std::memcpy(&bits, four_bytes, sizeof bits);
    const uint32x4_t each = vdupq_n_u32(bits);
    return {{each, each, each, each}};
}

// The first, and the second, number of each pair.
inline Floats first_of(Line pairs) {
    return for_parts([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs.part[i], 16)); });
}
inline Floats second_of(Line pairs) {
    return for_parts([&](int i) { return vreinterpretq_f32_u32(vandq_u32(pairs.part[i], vdupq_n_u32(0xFFFF0000))); });
}

// 16 integers.
struct Wholes {
    int32x4_t part[4];
};
inline Floats to_floats(Wholes numbers) { return for_parts([&](int i) { return vcvtq_f32_s32(numbers.part[i]); }); }

// Add the products of the numbers of 8 bits of each lane.
inline Wholes add_dots(Wholes sum, Line weights, Line values) {
    const auto dots = [&](int i) {
        return vdotq_s32(sum.part[i], vreinterpretq_s8_u32(weights.part[i]), vreinterpretq_s8_u32(values.part[i]));
    };
    return {{dots(0), dots(1), dots(2), dots(3)}};
}

// 16 pairs of numbers, in float32.
struct Pairs {
    Floats first, second;
};

// Transpose the first `count` of 32 numbers in float16 of 16 rows: the i-th number of each row is at `to + i * stride`.
inline void transpose_halves(const uint16_t* const rows[16], long count, float* to, long stride) {
    for (int quarter = 0; quarter < 4; quarter++)
        for (int start = 0; start < 32; start += 8) {
            uint32x4_t a[4];
            for (int i = 0; i < 4; i++) {
                uint16_t some[8] = {};
                const long left = count - start;
                if (left > 0) std::memcpy(some, rows[4 * quarter + i] + start, std::min(left, 8L) * sizeof(uint16_t));
                a[i] = vreinterpretq_u32_u16(vld1q_u16(some));
            }
            const uint32x4x2_t b = vtrnq_u32(a[0], a[1]), c = vtrnq_u32(a[2], a[3]);
            const uint32x4_t pairs[] = {
                vcombine_u32(vget_low_u32(b.val[0]), vget_low_u32(c.val[0])),
                vcombine_u32(vget_low_u32(b.val[1]), vget_low_u32(c.val[1])),
                vcombine_u32(vget_high_u32(b.val[0]), vget_high_u32(c.val[0])),
                vcombine_u32(vget_high_u32(b.val[1]), vget_high_u32(c.val[1])),
            };
            for (int i = 0; i < 4; i++) {
                float* const at = to + (start + 2 * i) * stride + 4 * quarter;
                vst1q_f32(at, from_halves(vmovn_u32(pairs[i])));
                vst1q_f32(at + stride, from_halves(vshrn_n_u32(pairs[i], 16)));
            }
        }
}
constexpr int NUM_SUMS = 4;  // vectors of sums that the registers hold
