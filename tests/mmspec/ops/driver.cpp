// Runs a kernel on what it reads from its input, and writes the result: for processors that this one is not.
//
//   product    sizes (kind, in, out, rows, bytes of the blocks), blocks, x (rows, in)
//   attention  sizes (nodes, slots, heads, kv_heads, head_dim), query (nodes, heads, head_dim), keys and values
//              (kv_heads, slots, head_dim) in bfloat16, mask (nodes, slots)

#include "../../../mmspec/ops/cpp/kernels.cpp"

#include <cstdio>
#include <string>

template <class T>
std::vector<T> taken(int64_t count) {
  std::vector<T> values(count + 64);  // readers load whole vectors
  if (std::fread(values.data(), sizeof(T), count, stdin) != size_t(count)) std::exit(1);
  return values;
}

int main(int, char** arguments) {
  std::vector<int64_t> sizes = taken<int64_t>(5);
  std::vector<float> out;
  if (std::string(arguments[1]) == "product") {
    int64_t rows = sizes[3];
    auto blocks = taken<uint8_t>(sizes[4]);
    auto x = taken<float>(rows * sizes[1]);
    Linear layer{blocks.data(), nullptr, sizes[0], sizes[1], sizes[2], sizes[2], nullptr};
    out.resize(rows * layer.out);
    linear(&layer, x.data(), rows, out.data(), 1);
  } else {
    int64_t nodes = sizes[0], slots = sizes[1], width = sizes[2] * sizes[4], kv_head = slots * sizes[4];
    auto query = taken<float>(nodes * width);
    auto key = taken<uint16_t>(sizes[3] * kv_head), value = taken<uint16_t>(sizes[3] * kv_head);
    auto mask = taken<uint8_t>(nodes * slots);
    out.resize(nodes * width);
    Attention a{};
    a.key = reinterpret_cast<uint8_t*>(key.data()), a.value = reinterpret_cast<uint8_t*>(value.data());
    a.query = query.data(), a.mask = mask.data(), a.read = out.data();
    a.scale = 0.125f, a.batch = 1, a.nodes = nodes, a.slots = slots, a.heads = sizes[2], a.kv_heads = sizes[3];
    a.head_dim = a.query_head = sizes[4], a.query_node = width, a.key_head = 2 * kv_head, a.key_slot = 2 * a.head_dim, a.mask_node = slots;
    attention(&a, 1);
  }
  return std::fwrite(out.data(), sizeof(float), out.size(), stdout) != out.size();
}
