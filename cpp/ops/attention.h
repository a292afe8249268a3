// What the kernels of attention by cuDNN share: what a call is, its checks, and what names its graph.
//
//   q, o     [B, Q, G, R, D]: R query heads share each of G heads of keys and values
//   k, v     [B, K, G, D]
//   qkv      [B, S, 3, G, D] in place of these three, where Q = K and R = 1
//   stats    f32[B, G, R, Q] the logarithm of each softmax's sum
//   seed     u32[4], two 64-bit numbers, low word first: seed and offset of Philox, which draws the mask of dropout
//   q_len, k_len  s32[B] tokens of each sequence; both absent where there is no padding
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/cudnn.h"

namespace te {

// ---- The call ---------------------------------------------------------------------------------------

struct AttentionOperands {
  const char* op;
  const In &q, &k, &v, &q_len, &k_len;
  bool lengths() const { return present(q_len); }
};

struct AttentionShape {
  int64_t batch, q_size, k_size, groups, repeats, head_size;
  int64_t heads() const { return groups * repeats; }
  bool empty() const { return batch == 0 || heads() == 0; }
};

struct AttentionOptions {
  float scale;
  float dropout;  // rate, in [0, 1)
  bool causal;
  int64_t left;  // how many keys before its own position a query sees, -1 for all; only where causal
};

// Of the kernels that have no dropout.
struct UndroppedAttributes {
  float scale;
  bool causal;
  int64_t left;
  Buffers buffers;
  AttentionOptions options() const { return {scale, /*dropout=*/0.f, causal, left}; }
};

inline Check& shape(Check& check, const char* argument, const ffi::AnyBuffer& b,
                    std::initializer_list<int64_t> expected) {
  return check.that(
      std::vector<int64_t>(b.dimensions().begin(), b.dimensions().end()) == std::vector<int64_t>(expected), argument,
      [&] {
        std::string text;
        for (const int64_t n : expected) text += (text.empty() ? "[" : ",") + std::to_string(n);
        return text + "]";
      },
      b);
}

inline Check& like(Check& check, const char* argument, const ffi::AnyBuffer& b, const ffi::AnyBuffer& other) {
  return check.that(
      b.element_type() == other.element_type() && b.dimensions() == other.dimensions(), argument,
      [&] { return describe(other); }, b);
}

inline Check& check_stats(Check& check, const ffi::AnyBuffer& stats, const AttentionShape& s) {
  return shape(check.dtype("stats", stats, DType::F32), "stats", stats, {s.batch, s.groups, s.repeats, s.q_size});
}

// Of queries in buffer `q`: head sizes are multiples of `step`.
inline Check& check_sizes(Check& check, const char* argument, const In& q, const AttentionOptions& options,
                          int64_t step, const AttentionShape& s) {
  check.that(s.q_size > 0 && s.k_size > 0, argument, "at least one token, and one key", q);
  check.that(
      s.head_size > 0 && s.head_size % step == 0, argument,
      [&] { return "a head size in multiples of " + std::to_string(step); }, q);
  return check.that(options.left < 0 || options.causal, "left", "a window only where causal", "one without");
}

// Whether q, k and v, of q's dtype, are those of one attention with head sizes in multiples of `step`; sets s.
inline Check check_attention(const AttentionOperands& in, const AttentionOptions& options, int64_t step,
                             AttentionShape& s) {
  Check check(in.op);
  const auto q = in.q.dimensions(), k = in.k.dimensions();
  check.that(q.size() == 5, "q", "[B, Q, G, R, D]", in.q).that(k.size() == 4, "k", "[B, K, G, D]", in.k);
  if (check.failed()) return check;
  s = {q[0], q[1], k[1], q[2], q[3], q[4]};
  check_sizes(check, "q", in.q, options, step, s);
  for (const auto& [name, x] : {std::pair<const char*, const In&>{"k", in.k}, {"v", in.v}}) {
    shape(check.dtype(name, x, in.q.element_type()), name, x, {s.batch, s.k_size, s.groups, s.head_size});
  }
  return check;
}

inline Check& check_lengths(Check& check, const AttentionOperands& in, const AttentionShape& s) {
  check.that(present(in.q_len) == present(in.k_len), "k_len", "given where q_len is", in.k_len);
  if (check.failed() || absent(in.q_len)) return check;
  shape(check.dtype("q_len", in.q_len, DType::S32), "q_len", in.q_len, {s.batch});
  return shape(check.dtype("k_len", in.k_len, DType::S32), "k_len", in.k_len, {s.batch});
}

inline bool is_16_bits(const ffi::AnyBuffer& b) {
  return b.element_type() == DType::BF16 || b.element_type() == DType::F16;
}

// ---- Its graph --------------------------------------------------------------------------------------

// Kinds of graphs, which keys tell apart; and the tensors of all of them.
enum AttentionKind : int64_t { kForward = 1, kBackward, kFp8Forward, kPackedForward, kPackedBackward, kCachedForward };
enum AttentionUid : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kStats,
  kSeed,
  kOffset,
  kQLen,
  kKLen,
  kDo,
  kDq,
  kDk,
  kDv,
  kDescaleQ,
  kDescaleK,
  kDescaleV,
  kDescaleS,
  kScaleS,
  kScaleO,
  kAmaxS,
  kAmaxO,
  kQOffset,
  kKOffset,
  kStatsOffset
};

struct AttentionCall {
  AttentionKind kind;
  DType dtype;
  AttentionShape shape;
  AttentionOptions options;
  bool lengths;
  bool stacked = false;  // q, k and v are parts of one array, and so are their gradients
  int64_t packed = 0;    // where not 0, each row of the batch holds up to so many sequences; see attention_packed.cu

  std::vector<int64_t> key() const {
    int32_t scale, dropout;
    std::memcpy(&scale, &options.scale, 4);
    std::memcpy(&dropout, &options.dropout, 4);
    return {kind,          static_cast<int64_t>(dtype),
            shape.batch,   shape.q_size,
            shape.k_size,  shape.groups,
            shape.repeats, shape.head_size,
            lengths,       stacked,
            packed,        options.causal,
            options.left,  scale,
            dropout};
  }
};

// How cuDNN's graph of a call is made, by attention_graph.cu.
cudnn::Call graph_call(const char* op, const AttentionCall& call);

// ---- In parts ---------------------------------------------------------------------------------------

// Entries that an array of the backward pass may span, dk and dv of each head among them: cuDNN (9.19) counts them in
// 32 bits, and of more gradients are wrong, silently. So examples are taken in parts.
constexpr int64_t kMostEntries = (int64_t{1} << 31) - 1;

// Examples that go together; 0 where a single one is too large.
inline int64_t most_examples(const AttentionCall& call) {
  const AttentionShape& s = call.shape;
  const int64_t tokens = std::max(s.q_size, s.k_size) * (call.stacked ? 3 : 1);
  return kMostEntries / std::max<int64_t>(tokens * s.heads() * s.head_size, 1);
}

// Of a call whose queries are in buffer `q`.
inline Check& check_parts(Check& check, const ffi::AnyBuffer& q, const AttentionCall& call) {
  const int64_t most = most_examples(call);
  check.that(most > 0, "q", "examples of fewer than 2^31 entries, which cuDNN counts in 32 bits: shard tokens or heads",
             q);
  return check.that(call.options.dropout == 0.f || call.shape.batch <= most, "q",
                    "fewer than 2^31 entries with dropout, whose masks can't be drawn in parts: shard the batch", q);
}

// What one example of the tensor takes; 0 of those that all examples share.
inline int64_t bytes_of_example(const AttentionCall& call, int64_t uid) {
  const AttentionShape& s = call.shape;
  const int64_t token = s.head_size * static_cast<int64_t>(ffi::ByteWidth(call.dtype));
  const int64_t queries = s.q_size * s.heads() * token, keys = s.k_size * s.groups * token;
  switch (uid) {
    case kQ:
    case kDq: return queries * (call.stacked ? 3 : 1);
    case kK:
    case kV:
    case kDk:
    case kDv: return keys * (call.stacked ? 3 : 1);
    case kO:
    case kDo: return queries;
    case kStats: return s.q_size * s.heads() * 4;
    case kQLen:
    case kKLen: return 4 * std::max<int64_t>(call.packed, 1);
    default: return 0;
  }
}

// run(part, the part's first example) for each part of a call, as even as can be.
template <typename Run>
ffi::Error in_parts(const AttentionCall& call, Run&& run) {
  const int64_t batch = call.shape.batch, count = (batch + most_examples(call) - 1) / most_examples(call);
  const int64_t size = (batch + count - 1) / count;
  for (int64_t first = 0; first < batch; first += size) {
    AttentionCall part = call;
    part.shape.batch = std::min(size, batch - first);
    if (const ffi::Error error = run(part, first); error.failure()) return error;
  }
  return ffi::Error::Success();
}

inline ffi::Error prepare_in_parts(const char* op, const AttentionCall& call, cudnn::Workspace workspace) {
  return in_parts(call,
                  [&](const AttentionCall& part, int64_t) { return cudnn::prepare(graph_call(op, part), workspace); });
}

inline cudnn::Pointers from_example(const AttentionCall& call, int64_t first, cudnn::Pointers all) {
  for (auto& [uid, data] : all) data = static_cast<char*>(data) + first * bytes_of_example(call, uid);
  return all;
}

inline ffi::Error execute_in_parts(const char* op, const AttentionCall& call, const cudnn::Pointers& all,
                                   cudnn::Workspace workspace, cudaStream_t stream) {
  return in_parts(call, [&](const AttentionCall& part, int64_t first) {
    return cudnn::execute(graph_call(op, part), from_example(call, first, all), workspace, stream);
  });
}

inline cudnn::Pointers pointers_of(const AttentionOperands& in) {
  cudnn::Pointers all{{kQ, in.q.untyped_data()}, {kK, in.k.untyped_data()}, {kV, in.v.untyped_data()}};
  if (in.lengths()) all.insert({{kQLen, in.q_len.untyped_data()}, {kKLen, in.k_len.untyped_data()}});
  return all;
}

}  // namespace te

TE_ATTRIBUTES(te::UndroppedAttributes, TE_ATTRIBUTE(float, scale), TE_ATTRIBUTE(bool, causal),
              TE_ATTRIBUTE(int64_t, left), TE_ATTRIBUTE(te::Buffers, buffers));
