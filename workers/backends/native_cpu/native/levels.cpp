// Which levels this CPU can run. Compiled for any x86-64.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "level.h"

namespace headrace {

extern const Level kAvx512Level;
extern const Level kAmxLevel;

namespace {

bool has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

#ifdef HEADRACE_TILES_EMULATED
bool has_amx() { return true; }
#else
// Linux lets a process use the tile registers only after it has asked.
bool permitted_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d >> 24 & 1) && (d >> 22 & 1) && permitted_tiles();
}
#endif

}  // namespace

#ifdef HEADRACE_TILES_EMULATED
const Level *avx512_level() { return nullptr; }
#else
const Level *avx512_level() { return has_avx512() ? &kAvx512Level : nullptr; }
#endif

const Level *amx_level() { return has_avx512() && has_amx() ? &kAmxLevel : nullptr; }

const Level *choose_level() {
    const char *wanted = getenv("HEADRACE_CPU_ISA");
    if (!wanted || !*wanted) {
        const Level *best = amx_level();
        return best ? best : avx512_level();
    }
    if (!strcmp(wanted, "amx")) return amx_level();
    if (!strcmp(wanted, "avx512") || !strcmp(wanted, "avx512_bf16")) return avx512_level();
    return nullptr;
}

}  // namespace headrace
