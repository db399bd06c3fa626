// Runs the kernels on the emulator, in an order and with values drawn from a seed.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arrays.h"

// The check, the seed, and the number of the change to the kernels.
int main(int, char** argv) {
  emu::seed(static_cast<unsigned int>(std::atoi(argv[2])));
  emu::change_in_force = std::atoi(argv[3]);
  if (std::strcmp(argv[1], "products") == 0) {
    check_products();
  } else {
    check_quantized();
  }
  std::printf("OK\n");
}
