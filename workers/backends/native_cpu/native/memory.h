// Memory that is zero, aligned and taken as it is first written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace headrace {

class Pages {
public:
    Pages() = default;
    ~Pages() { release(); }
    Pages(const Pages &) = delete;
    Pages &operator=(const Pages &) = delete;

    // Throws nothing: false when there is no memory. What was there is gone.
    bool allocate(size_t bytes) {
        release();
        const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
        void *mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) return false;
        mapped_ = mapped, mapped_bytes_ = whole, bytes_ = bytes;
        const auto address = reinterpret_cast<uintptr_t>(mapped);
        data_ = reinterpret_cast<uint8_t *>((address + kHugePage - 1) / kHugePage * kHugePage);
        if (bytes >= kHugePage) madvise(data_, whole - kHugePage, MADV_HUGEPAGE);
        return true;
    }
    // Keeps what is there when it is large enough.
    bool reserve(size_t bytes) { return bytes <= bytes_ || allocate(bytes); }

    uint8_t *data() const { return data_; }
    template <typename Value> Value *as() const { return reinterpret_cast<Value *>(data_); }
    size_t bytes() const { return bytes_; }

private:
    static constexpr size_t kHugePage = 2 << 20;

    void release() {
        if (mapped_) munmap(mapped_, mapped_bytes_);
        mapped_ = nullptr, data_ = nullptr, bytes_ = 0;
    }

    void *mapped_ = nullptr;
    size_t mapped_bytes_ = 0;
    uint8_t *data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace headrace
