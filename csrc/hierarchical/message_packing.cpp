// Checks the tensors of messages and builds the kernels' jobs.
#include "hierarchical/message_packing.h"

#include <climits>
#include <cstdint>

#include "common/error.h"

namespace ncclep::native {

namespace {

std::int64_t row_bytes_of(const Tensor& rows) { return rows.shape[1] * itemsize_of(rows.dtype); }

void require_vectors(const char* what, const Tensor& tensor) {
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % kMessageVector == 0, what,
          ": rows and messages must start at a multiple of ", kMessageVector, " bytes");
}

// Rows of whole vectors that contain the piece, and messages with room for the piece and the
// weights.
void require_rows(const char* what, const Tensor& rows, const Tensor& messages, std::int64_t first,
                  std::int64_t piece_bytes, std::int64_t num_weights) {
  require(rows.ndim == 2 && messages.ndim == 2 && messages.dtype == ncclepUint8, what,
          ": rows must be [T, H], and messages uint8 [messages, bytes]");
  const std::int64_t row_bytes = row_bytes_of(rows), message_bytes = messages.shape[1];
  for (const std::int64_t size : {row_bytes, first, piece_bytes, message_bytes}) {
    require(size >= 0 && size <= INT_MAX && size % kMessageVector == 0, what, ": ", size,
            " bytes: must be a multiple of ", kMessageVector, ", at most ", INT_MAX);
  }
  require(piece_bytes > 0 && first + piece_bytes <= row_bytes, what, ": a piece of ", piece_bytes,
          " bytes from byte ", first, " on, of rows of ", row_bytes);
  require(num_weights <= INT_MAX / 8 && message_bytes - piece_bytes >= 4 * num_weights, what,
          ": messages of ", message_bytes, " bytes have no room for a piece of ", piece_bytes,
          " and ", num_weights, " weights");
  require_vectors(what, rows);
  require_vectors(what, messages);
}

void require_weights(const char* what, const Tensor& w, std::int64_t num_rows) {
  require(w.dtype == ncclepFloat32 && w.ndim == 2 && w.shape[0] == num_rows, what,
          ": weights must be fp32 [", num_rows, ", K]");
}

template <typename T>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data) : nullptr;
}

}  // namespace

void pack_messages(const Tensor& rows, const std::optional<Tensor>& w,
                   const std::optional<Tensor>& token, std::int64_t tokens_each, int first,
                   int piece_bytes, const Tensor& messages, std::uintptr_t stream) {
  const char* what = "pack_messages";
  require(!w || w->ndim == 2, what, ": weights must be fp32 [T, K]");
  require_rows(what, rows, messages, first, piece_bytes, w ? w->shape[1] : 0);
  if (w) require_weights(what, *w, rows.shape[0]);
  const std::int64_t num_messages = messages.shape[0];
  require(tokens_each >= 0 && (token || tokens_each > 0 || num_messages == 0), what,
          ": tokens_each ", tokens_each, ": must be positive if `token` is not given");
  require(!token || (token->dtype == ncclepInt32 && token->num_elements() == num_messages), what,
          ": the token of each message must be int32 [", num_messages, "]");
  PackMessages job{};
  job.rows = static_cast<const char*>(rows.data);
  job.w = pointer<const float>(w);
  job.token = pointer<const std::int32_t>(token);
  job.messages = static_cast<char*>(messages.data);
  job.num_messages = num_messages;
  job.num_tokens = rows.shape[0];
  job.tokens_each = tokens_each;
  job.row_bytes = static_cast<int>(row_bytes_of(rows));
  job.first = first;
  job.piece_bytes = piece_bytes;
  job.num_weights = w ? static_cast<int>(w->shape[1]) : 0;
  job.message_bytes = static_cast<int>(messages.shape[1]);
  pack_messages(job, stream);
}

void unpack_messages(const Tensor& messages, const Tensor& rows, const Tensor& w,
                     std::uintptr_t stream) {
  const char* what = "unpack_messages";
  require(rows.ndim == 2 && w.ndim == 2, what, ": rows and weights are matrices");
  require_rows(what, rows, messages, 0, row_bytes_of(rows), w.shape[1]);
  require(rows.shape[0] == messages.shape[0], what, ": needs a row for each of ", messages.shape[0],
          " messages, not ", rows.shape[0]);
  require_weights(what, w, messages.shape[0]);
  UnpackMessages job{};
  job.messages = static_cast<const char*>(messages.data);
  job.rows = static_cast<char*>(rows.data);
  job.w = static_cast<float*>(w.data);
  job.num_messages = messages.shape[0];
  job.row_bytes = static_cast<int>(row_bytes_of(rows));
  job.num_weights = static_cast<int>(w.shape[1]);
  job.message_bytes = static_cast<int>(messages.shape[1]);
  unpack_messages(job, stream);
}

void add_up_messages(const Tensor& messages, const Tensor& message_index, const Tensor& out,
                     int first, int piece_bytes, const std::optional<Tensor>& assignment_node,
                     const std::optional<Tensor>& topk_w, std::uintptr_t stream) {
  const char* what = "add_up_messages";
  require(!topk_w || topk_w->ndim == 2, what, ": weights must be fp32 [T, K]");
  require_rows(what, out, messages, first, piece_bytes, topk_w ? topk_w->shape[1] : 0);
  require(out.dtype == ncclepBfloat16 || out.dtype == ncclepFloat16 || out.dtype == ncclepFloat32,
          what, ": rows must be bf16, fp16 or fp32");
  require(message_index.dtype == ncclepInt32 && message_index.ndim == 2 &&
              message_index.shape[0] <= INT_MAX && message_index.shape[1] == out.shape[0],
          what, ": places must be int32 [nodes, ", out.shape[0], "]");
  require(!topk_w || assignment_node, what, ": values need to know the node of each assignment");
  if (topk_w) {
    require_weights(what, *topk_w, out.shape[0]);
    require(assignment_node->dtype == ncclepInt32 && assignment_node->has_shape_of(*topk_w), what,
            ": the nodes of assignments must be int32 of the values' shape");
  }
  AddUpMessages job{};
  job.messages = static_cast<const char*>(messages.data);
  job.message_index = static_cast<const std::int32_t*>(message_index.data);
  job.assignment_node = pointer<const std::int32_t>(assignment_node);
  job.out = static_cast<char*>(out.data);
  job.topk_w = pointer<float>(topk_w);
  job.dtype = out.dtype;
  job.num_tokens = out.shape[0];
  job.num_nodes = static_cast<int>(message_index.shape[0]);
  job.row_bytes = static_cast<int>(row_bytes_of(out));
  job.first = first;
  job.piece_bytes = piece_bytes;
  job.num_weights = topk_w ? static_cast<int>(topk_w->shape[1]) : 0;
  job.message_bytes = static_cast<int>(messages.shape[1]);
  add_up_messages(job, stream);
}

}  // namespace ncclep::native
