// Products and rows of matrices in GGUF's blocks.
#include "products.h"

instantiate_blocks("matvec", matmul, 1) instantiate_blocks("matmul", matmul, 4)
    instantiate_blocks_alone("matmul_transposed", matmul_transposed) instantiate_blocks_alone("embed", embed)
