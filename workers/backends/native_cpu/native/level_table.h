// A level from an engine.
#pragma once

#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace headrace {
namespace {

template <class Engine> constexpr Level level_of(const char *name) {
    return {name,
            sizeof(typename Engine::Value),
            Engine::kHasCodes,
            Engine::begin,
            Engine::end,
            product<Engine>,
            prepare<Engine>,
            norm,
            store,
            add,
            activate,
            finish_logits,
            largest,
            write_kv<Engine>,
            AttentionOf<Engine>::scratch_bytes,
            AttentionOf<Engine>::attend,
            AttentionOf<Engine>::merge};
}

}  // namespace
}  // namespace headrace
