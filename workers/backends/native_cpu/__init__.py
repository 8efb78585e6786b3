"""The decoder in C++ for CPUs with AMX or with AVX512 and VNNI: neither torch nor transformers is imported."""
