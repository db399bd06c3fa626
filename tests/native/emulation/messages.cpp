// Kernels that pack, unpack and add up messages between nodes: random jobs on one rank.
#include <cstring>
#include <vector>

#include "hierarchical/message_packing.h"
#include "sequence.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

namespace {

struct Shape {
  int tokens = between(0, 20), nodes = between(1, 4), num_weights = one_of({1, 3, 8, 40});
  int vectors = one_of({1, 5, 64, 65, 141}), begin = between(0, vectors - 1);
  int end = between(begin + 1, vectors);
  Numbers numbers = Numbers::of_any_dtype();

  int row_bytes() const { return vectors * kMessageVector; }
  int first() const { return begin * kMessageVector; }
  int piece_bytes() const { return (end - begin) * kMessageVector; }
  int message_bytes(bool has_weights) const {
    return piece_bytes() + (has_weights ? (4 * num_weights + 15) / 16 * 16 : 0);
  }
  // Of a row, and of its piece.
  int hidden() const { return row_bytes() / numbers.size(); }
  int width() const { return piece_bytes() / numbers.size(); }
};

template <typename Job>
void describe(Job& job, const Shape& shape, bool has_weights) {
  job.row_bytes = shape.row_bytes();
  job.first = shape.first();
  job.piece_bytes = shape.piece_bytes();
  job.num_weights = has_weights ? shape.num_weights : 0;
  job.message_bytes = shape.message_bytes(has_weights);
}

void require_bytes(const char* found, const char* expected, std::size_t num_bytes, const char* what,
                   int message) {
  require(std::memcmp(found, expected, num_bytes) == 0, "network: ", what, " ", message);
}

// Random messages of a rank's tokens, and what they become when they are unpacked.
void pack_and_unpack(const Shape& shape) {
  const bool has_weights = between(0, 1) == 1, has_list = between(0, 1) == 1;
  const int each = shape.tokens + between(1, 3);
  const int count = has_list ? (shape.tokens == 0 ? 0 : between(0, 30)) : each * shape.nodes;
  const int bytes = shape.message_bytes(has_weights), hidden = shape.hidden();
  const int piece_bytes = shape.piece_bytes(), weight_bytes = 4 * shape.num_weights;
  Memory rows(shape.tokens * shape.row_bytes(), 0), w(shape.tokens * weight_bytes, 0);
  shape.numbers.put(rows.data<char>(), shape.tokens * hidden,
                    [&](int i) { return value(0, 0, i / hidden, i % hidden); });
  kWeights.put(w.data<char>(), shape.tokens * shape.num_weights,
               [&](int i) { return weight(0, 0, i); });
  Memory list(count * 4, 0), messages(count * bytes, kGarbage);
  auto* tokens = list.data<std::int32_t>();
  for (int i = 0; i < count; ++i) tokens[i] = has_list ? between(0, shape.tokens - 1) : i % each;
  PackMessages job{};
  describe(job, shape, has_weights);
  job.rows = rows.data<char>();
  job.w = has_weights ? w.data<float>() : nullptr;
  job.token = has_list ? tokens : nullptr;
  job.messages = messages.data<char>();
  job.num_messages = count;
  job.num_tokens = shape.tokens;
  job.tokens_each = has_list ? 0 : each;
  pack_messages(job, 0);
  emu::synchronize(0);
  for (int i = 0; i < count; ++i) {
    const int token = tokens[i];
    std::vector<char> expected(bytes, token < shape.tokens ? 0 : kGarbage);
    if (token < shape.tokens) {
      std::memcpy(expected.data(), rows.data<char>() + token * shape.row_bytes() + shape.first(),
                  piece_bytes);
      if (has_weights) {
        std::memcpy(expected.data() + piece_bytes, w.data<char>() + token * weight_bytes,
                    weight_bytes);
      }
    }
    require_bytes(messages.data<char>() + i * bytes, expected.data(), bytes, "message", i);
  }
  if (!has_weights) return;

  Memory got_rows(count * piece_bytes, kGarbage), got_w(count * weight_bytes, kGarbage);
  UnpackMessages unpacked{};
  unpacked.messages = messages.data<char>();
  unpacked.rows = got_rows.data<char>();
  unpacked.w = got_w.data<float>();
  unpacked.num_messages = count;
  unpacked.row_bytes = piece_bytes;
  unpacked.num_weights = shape.num_weights;
  unpacked.message_bytes = bytes;
  unpack_messages(unpacked, 0);
  emu::synchronize(0);
  for (int i = 0; i < count; ++i) {
    const char* message = messages.data<char>() + i * bytes;
    require_bytes(got_rows.data<char>() + i * piece_bytes, message, piece_bytes, "row of message",
                  i);
    require_bytes(got_w.data<char>() + i * weight_bytes, message + piece_bytes, weight_bytes,
                  "weights of message", i);
  }
}

// Random messages of nodes, and their sums at the source rank.
void add_up(const Shape& shape) {
  const bool has_values = between(0, 1) == 1;
  const Numbers& numbers = shape.numbers;
  const int bytes = shape.message_bytes(has_values), width = shape.width();
  const int count = shape.tokens * shape.nodes, hidden = shape.hidden(), K = shape.num_weights;
  Memory messages(count * bytes, kGarbage), place(count * 4, 0);
  auto* places = place.data<std::int32_t>();
  // Message i is of node i / tokens for token i % tokens.
  for (int i = 0; i < count; ++i) {
    // They lie in another order than in that of tokens.
    const int at = i / shape.tokens + i % shape.tokens * shape.nodes;
    places[i] = between(0, 2) == 0 ? -1 : at;
    char* const message = messages.data<char>() + at * bytes;
    numbers.put(message, width, [&](int n) { return value(1, 0, i, n); });
    if (!has_values) continue;
    kWeights.put(message + shape.piece_bytes(), K, [&](int k) { return weight(1, i, k); });
  }
  Memory node_of(shape.tokens * K * 4, 0), topk_w(shape.tokens * K * 4, kGarbage);
  auto* nodes = node_of.data<std::int32_t>();
  for (int i = 0; i < shape.tokens * K; ++i) {
    // An assignment goes to a node that has a message, or nowhere.
    const int node = between(-1, shape.nodes - 1);
    nodes[i] = node >= 0 && places[node * shape.tokens + i / K] >= 0 ? node : -1;
  }
  Memory out(shape.tokens * shape.row_bytes(), kGarbage);
  AddUpMessages job{};
  describe(job, shape, has_values);
  job.messages = messages.data<char>();
  job.place = places;
  job.assignment_node = has_values ? nodes : nullptr;
  job.out = out.data<char>();
  job.topk_w = has_values ? topk_w.data<float>() : nullptr;
  job.dtype = numbers.dtype();
  job.num_tokens = shape.tokens;
  job.num_nodes = shape.nodes;
  add_up_messages(job, 0);
  emu::synchronize(0);
  std::vector<char> untouched(shape.row_bytes(), kGarbage);
  for (int token = 0; token < shape.tokens; ++token) {
    const char* row = out.data<char>() + token * shape.row_bytes();
    const int end = shape.first() + shape.piece_bytes();
    require_bytes(row, untouched.data(), shape.first(), "outside of the piece of token", token);
    require_bytes(row + end, untouched.data(), shape.row_bytes() - end, "behind the piece of token",
                  token);
    numbers.expect(
        row + shape.first(), width,
        [&](int n) {
          float total = 0;
          for (int i = token; i < count; i += shape.tokens) {
            if (places[i] >= 0) total += numbers.round(value(1, 0, i, n));
          }
          return total;
        },
        "network: sum of token ", token);
  }
  if (!has_values) return;
  kWeights.expect(
      topk_w.data<char>(), shape.tokens * K,
      [&](int i) { return nodes[i] < 0 ? 0 : weight(1, nodes[i] * shape.tokens + i / K, i % K); },
      "network: value");
}

}  // namespace

void run_messages() {
  emu::run(1, [](int) {
    for (int turn = 0; turn < 4; ++turn) {
      pack_and_unpack(Shape());
      add_up(Shape());
    }
  });
}
