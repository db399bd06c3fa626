// Messages between nodes: one for each token that crosses, row and weights together.
//
// A message is a piece of the row (the same columns of all rows) followed by the weights, fp32,
// padded with zeros to a multiple of kMessageVector bytes.  Other code decides which tokens cross.
// megatron_ncclep/engines/hierarchical/message_packing.py specifies these kernels.
#pragma once

#include <cstdint>
#include <optional>

#include "common/dtype.h"
#include "common/tensor.h"

namespace ncclep::native {

// Bytes that the kernels move at a time: all offsets and sizes of rows are multiples of it.
constexpr int kMessageVector = 16;

struct PackMessages {
  const char* rows;  // [T, row_bytes]
  const float* w;    // [T, K], or null
  // [num_messages]: the token whose row each message carries; null: message i carries that of token
  // i % tokens_each, if there is such a token.
  const std::int32_t* token;
  char* messages;  // [num_messages, message_bytes]
  std::int64_t num_messages, num_tokens, tokens_each;
  int row_bytes;
  int first, piece_bytes, num_weights, message_bytes;
};

struct UnpackMessages {
  const char* messages;  // [num_messages, message_bytes]
  char* rows;            // [num_messages, piece_bytes]
  float* w;              // [num_messages, K]
  std::int64_t num_messages;
  int row_bytes;  // of a piece
  int num_weights, message_bytes;
};

struct AddUpMessages {
  const char* messages;               // [num_messages, message_bytes]
  const std::int32_t* message_index;  // [nodes, T]: the message of each node for each token, or -1
  const std::int32_t*
      assignment_node;  // [T, K]: the node of each assignment, or -1; null: no values
  char* out;            // [T, row_bytes]: a piece of each row is written
  float* topk_w;        // [T, K]: values of the assignments, or null
  DType dtype;          // bf16, fp16 or fp32
  std::int64_t num_tokens;
  int num_nodes;
  int row_bytes;
  int first, piece_bytes, num_weights, message_bytes;
};

// Each queues one kernel and does not wait; jobs are not validated.
void pack_messages(const PackMessages& job, std::uintptr_t stream);
void unpack_messages(const UnpackMessages& job, std::uintptr_t stream);
// Each token's messages in ascending order of nodes, in fp32 from +0, rounded once.
void add_up_messages(const AddUpMessages& job, std::uintptr_t stream);

// The same for tensors, which are checked (message_packing.cpp).
//
// rows [T, H] of any dtype, w fp32 [T, K], token int32 [messages], messages uint8 [messages,
// bytes].
void pack_messages(const Tensor& rows, const std::optional<Tensor>& w,
                   const std::optional<Tensor>& token, std::int64_t tokens_each, int first,
                   int piece_bytes, const Tensor& messages, std::uintptr_t stream);
// rows uint8 [messages, piece_bytes], w fp32 [messages, K].
void unpack_messages(const Tensor& messages, const Tensor& rows, const Tensor& w,
                     std::uintptr_t stream);
// message_index int32 [nodes, T], out [T, H], assignment_node int32 [T, K] and topk_w fp32 [T, K]
// together.
void add_up_messages(const Tensor& messages, const Tensor& message_index, const Tensor& out,
                     int first, int piece_bytes, const std::optional<Tensor>& assignment_node,
                     const std::optional<Tensor>& topk_w, std::uintptr_t stream);

}  // namespace ncclep::native
