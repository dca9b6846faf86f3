"""C++ kernels behind a plain C ABI: `build` compiles them, `library` loads them."""
