"""The decoder in C++ for CPUs with AVX512-BF16 or AMX: neither torch nor transformers is imported."""
