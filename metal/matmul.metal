// Products and rows of matrices of packed codes and of plain elements.
#include "products.h"

instantiate_formats("matvec", matmul, 1)
instantiate_formats("matmul", matmul, 4)
instantiate_alone("matmul_transposed", matmul_transposed)
instantiate_alone("embed", embed)
