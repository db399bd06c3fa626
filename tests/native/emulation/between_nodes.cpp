#include "between_nodes.h"

#include <cstring>
#include <vector>

#include "hierarchical/message_packing.h"
#include "memory.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

namespace {

// Payload; sums of it depend on their order.
float value(int row, int i) {
  const unsigned int mixed = (row * 1013u + i * 151u + 29u) * 2654435761u;
  return (static_cast<int>(mixed >> 8) - (1 << 23)) / static_cast<float>((1 + mixed % 997) << 14);
}

struct Shape {
  int tokens = between(0, 20), nodes = between(1, 4), weights = one_of({1, 3, 8, 40});
  int vectors = one_of({1, 5, 64, 65, 141}), begin = between(0, vectors - 1);
  int end = between(begin + 1, vectors);
  Numbers numbers{
      one_of({ncclep::DType::kFloat32, ncclep::DType::kBFloat16, ncclep::DType::kFloat16})};

  int row_bytes() const { return vectors * kMessageVector; }
  int first() const { return begin * kMessageVector; }
  int piece_bytes() const { return (end - begin) * kMessageVector; }
  int width() const { return piece_bytes() / numbers.size(); }  // numbers of a piece
  int message_bytes(bool has_weights) const {
    return piece_bytes() + (has_weights ? (4 * weights + 15) / 16 * 16 : 0);
  }
};

const Numbers kWeights(ncclep::DType::kFloat32);

void fill(const Numbers& numbers, Memory& memory, int row, int width) {
  const int count = static_cast<int>(memory.num_bytes()) / numbers.size();
  for (int i = 0; i < count; ++i) numbers.put(memory, i, value(row + i / width, i % width));
}

// Random messages of a rank's tokens, and what comes of them when they are taken apart.
void pack_and_unpack(const Shape& shape) {
  const bool has_weights = between(0, 1) == 1, has_list = between(0, 1) == 1;
  const int each = shape.tokens + between(1, 3);
  const int count = has_list ? (shape.tokens == 0 ? 0 : between(0, 30)) : each * shape.nodes;
  const int bytes = shape.message_bytes(has_weights);
  Memory rows(shape.tokens * shape.row_bytes(), 0), w(shape.tokens * shape.weights * 4, 0);
  fill(shape.numbers, rows, 0, shape.row_bytes() / shape.numbers.size());
  fill(kWeights, w, 5000, shape.weights);
  Memory list(count * 4, 0), messages(count * bytes, kGarbage);
  for (int i = 0; i < count; ++i) {
    list.data<std::int32_t>()[i] = has_list ? between(0, shape.tokens - 1) : i % each;
  }
  PackMessages job{};
  job.rows = rows.data<char>();
  job.w = has_weights ? w.data<float>() : nullptr;
  job.token = has_list ? list.data<std::int32_t>() : nullptr;
  job.messages = messages.data<char>();
  job.num_messages = count;
  job.num_tokens = shape.tokens;
  job.tokens_each = has_list ? 0 : each;
  job.row_bytes = shape.row_bytes();
  job.first = shape.first();
  job.piece_bytes = shape.piece_bytes();
  job.num_weights = has_weights ? shape.weights : 0;
  job.message_bytes = bytes;
  pack_messages(job, 0);
  emu::synchronize(0);
  for (int i = 0; i < count; ++i) {
    const int token = list.data<std::int32_t>()[i];
    std::vector<char> expected(bytes, kGarbage);
    if (token < shape.tokens) {
      std::memset(expected.data(), 0, bytes);
      std::memcpy(expected.data(), rows.data<char>() + token * shape.row_bytes() + shape.first(),
                  shape.piece_bytes());
      if (has_weights) {
        std::memcpy(expected.data() + shape.piece_bytes(),
                    w.data<char>() + token * shape.weights * 4, shape.weights * 4);
      }
    }
    require(std::memcmp(messages.data<char>() + i * bytes, expected.data(), bytes) == 0,
            "network: message ", i, " of token ", token);
  }
  if (!has_weights) return;

  Memory got_rows(count * shape.piece_bytes(), kGarbage);
  Memory got_w(count * shape.weights * 4, kGarbage);
  UnpackMessages unpacked{};
  unpacked.messages = messages.data<char>();
  unpacked.rows = got_rows.data<char>();
  unpacked.w = got_w.data<float>();
  unpacked.num_messages = count;
  unpacked.row_bytes = shape.piece_bytes();
  unpacked.num_weights = shape.weights;
  unpacked.message_bytes = bytes;
  unpack_messages(unpacked, 0);
  emu::synchronize(0);
  for (int i = 0; i < count; ++i) {
    const char* message = messages.data<char>() + i * bytes;
    require(std::memcmp(got_rows.data<char>() + i * shape.piece_bytes(), message,
                        shape.piece_bytes()) == 0,
            "network: row of message ", i);
    require(std::memcmp(got_w.data<char>() + i * shape.weights * 4, message + shape.piece_bytes(),
                        shape.weights * 4) == 0,
            "network: weights of message ", i);
  }
}

// Random messages of nodes, and their sums at the source rank.
void add_up(const Shape& shape) {
  const bool has_values = between(0, 1) == 1;
  const int bytes = shape.message_bytes(has_values), width = shape.width();
  const int count = shape.tokens * shape.nodes;
  const int row_width = shape.row_bytes() / shape.numbers.size();
  Memory messages(count * bytes, kGarbage), place(count * 4, 0);
  for (int i = 0; i < count; ++i) {
    // Of the nodes in turn, so that they stand in another order than tokens.
    const int at = i / shape.tokens + i % shape.tokens * shape.nodes;
    place.data<std::int32_t>()[i] = between(0, 2) == 0 ? -1 : at;
    for (int n = 0; n < width; ++n) {
      const std::uint32_t number = shape.numbers.bits(value(i, n));
      std::memcpy(messages.data<char>() + at * bytes + n * shape.numbers.size(), &number,
                  shape.numbers.size());
    }
    for (int k = 0; has_values && k < shape.weights; ++k) {
      reinterpret_cast<float*>(messages.data<char>() + at * bytes + shape.piece_bytes())[k] =
          value(9000 + i, k);
    }
  }
  const int assignments = shape.tokens * shape.weights;
  Memory node_of(assignments * 4, 0), topk_w(assignments * 4, kGarbage);
  for (int i = 0; i < assignments; ++i) {
    // A assignment that goes somewhere goes to a node that has a message.
    const int token = i / shape.weights, node = between(-1, shape.nodes - 1);
    const bool is_there = node >= 0 && place.data<std::int32_t>()[node * shape.tokens + token] >= 0;
    node_of.data<std::int32_t>()[i] = is_there ? node : -1;
  }
  Memory out(shape.tokens * shape.row_bytes(), kGarbage);
  AddUpMessages job{};
  job.messages = messages.data<char>();
  job.place = place.data<std::int32_t>();
  job.assignment_node = has_values ? node_of.data<std::int32_t>() : nullptr;
  job.out = out.data<char>();
  job.topk_w = has_values ? topk_w.data<float>() : nullptr;
  job.dtype = shape.numbers.dtype();
  job.num_tokens = shape.tokens;
  job.num_nodes = shape.nodes;
  job.row_bytes = shape.row_bytes();
  job.first = shape.first();
  job.piece_bytes = shape.piece_bytes();
  job.num_weights = has_values ? shape.weights : 0;
  job.message_bytes = bytes;
  add_up_messages(job, 0);
  emu::synchronize(0);
  const Numbers& numbers = shape.numbers;
  const int from = shape.first() / numbers.size();
  for (int token = 0; token < shape.tokens; ++token) {
    for (int n = 0; n < row_width; ++n) {
      const std::uint32_t actual = numbers.get(out, token * row_width + n);
      if (n < from || n >= from + width) {
        const std::uint32_t garbage = numbers.size() == 2 ? 0x7f7f : 0x7f7f7f7f;
        require(actual == garbage, "network: token ", token, " outside of its piece");
        continue;
      }
      float total = 0;
      for (int node = 0; node < shape.nodes; ++node) {
        const int i = node * shape.tokens + token;
        if (place.data<std::int32_t>()[i] >= 0) total += numbers.round(value(i, n - from));
      }
      require(actual == numbers.bits(total), "network: sum of token ", token, ", number ", n);
    }
    for (int k = 0; has_values && k < shape.weights; ++k) {
      const int node = node_of.data<std::int32_t>()[token * shape.weights + k];
      const float expected = node < 0 ? 0 : value(9000 + node * shape.tokens + token, k);
      require(kWeights.get(topk_w, token * shape.weights + k) == kWeights.bits(expected),
              "network: value of token ", token, ", assignment ", k);
    }
  }
}

}  // namespace

void run_network_rows() {
  emu::run(1, [](int) {
    for (int turn = 0; turn < 4; ++turn) {
      pack_and_unpack(Shape());
      add_up(Shape());
    }
  });
}
