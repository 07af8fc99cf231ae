// The end of a row: normalise, and write the output and its LSE.
#pragma once

#include "attention.cuh"

// Finish a row of a tile, given its largest logit (base 2) and the sum of weights relative to it.
// `count` elements of the sum of weighted values are written from `first` on, and by one thread
// (`first` 0) the LSE. Learned sinks join here, unless states are merged later.
struct RowEnd {
  char* out;      // [v.width]
  int format;     // of out
  float* lse;     // or null
  float divisor;  // of the weighted values; 0: no key was seen
  float lse_value;
};

__device__ __forceinline__ RowEnd end_of_row(const AttentionParams& p, const AttentionTile& t,
                                             int row, int kv_head, float largest, float sum) {
  const int packed = t.first_row + row;
  const i64 token = t.first_token + packed / p.group;
  const i64 head = i64{kv_head} * p.group + packed % p.group;
  RowEnd end;
  const bool seen = sum != 0.0f;  // a NaN was seen too
  if (t.state >= 0) {
    const i64 heads = i64{t.state} * (p.num_heads / p.group) + kv_head;
    const i64 at = heads * p.state_rows + row;
    end.out = p.partial_out + at * p.v.width * 4;
    end.format = 0;
    end.lse = reinterpret_cast<float*>(p.partial_lse) + at;
  } else {
    end.out = p.out + token * p.out_token_bytes + head * p.out_head_bytes;
    end.format = p.out_format;
    end.lse =
        p.lse
            ? reinterpret_cast<float*>(p.lse + token * p.lse_token_bytes + head * p.lse_head_bytes)
            : nullptr;
    const float sink = p.sinks
                           ? *reinterpret_cast<const float*>(p.sinks + head * p.sink_bytes) * kLog2E
                           : -kInfinity;
    if (sink != -kInfinity) {
      const float both = fmaxf(largest, sink);
      const float rescale = seen ? exp2f(largest - both) : 0.0f;
      const float total = sum * rescale + exp2f(sink - both);
      end.divisor = rescale != 0.0f ? total / rescale : 0.0f;
      end.lse_value = (both + log2f(total)) * kLn2;
      return end;
    }
  }
  end.divisor = seen ? sum : 0.0f;
  end.lse_value = seen ? (largest + log2f(sum)) * kLn2 : -kInfinity;
  return end;
}
