// The C interface: checks what it is given, then calls.
#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <string>
#include <system_error>

#include "model.h"
#include "pack.h"

using namespace headrace;

namespace {

thread_local std::string last_error;

__attribute__((format(printf, 2, 3))) int fail(headrace_status status, const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    last_error = text;
    return status;
}

int no_memory() { return fail(HEADRACE_NO_MEMORY, "out of memory"); }

int check_config(const headrace_config &c) {
    if (c.abi != HEADRACE_CPU_ABI)
        return fail(HEADRACE_INVALID, "interface %d asked for, this is %d", c.abi, HEADRACE_CPU_ABI);
    for (int size : {c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads,
                     c.head_dim, c.rope_positions})
        if (size < 1) return fail(HEADRACE_INVALID, "a size is %d", size);
    if (c.num_heads % c.num_kv_heads)
        return fail(HEADRACE_INVALID, "%d heads do not divide over %d KV heads", c.num_heads, c.num_kv_heads);
    if (c.head_dim > 512) return fail(HEADRACE_INVALID, "head_dim %d is above 512", c.head_dim);
    if (c.rotary_dim < 0 || c.rotary_dim % 2 || c.rotary_dim > c.head_dim)
        return fail(HEADRACE_INVALID, "rotary_dim %d of a head_dim of %d", c.rotary_dim, c.head_dim);
    if (c.kv_type != HEADRACE_BF16 && c.kv_type != HEADRACE_INT8)
        return fail(HEADRACE_INVALID, "KV type %d", c.kv_type);
    if (c.activation != HEADRACE_SILU && c.activation != HEADRACE_GELU_TANH)
        return fail(HEADRACE_INVALID, "activation %d", c.activation);
    return HEADRACE_OK;
}

int check_step(const headrace_model &m, const headrace_step_arguments &a) {
    if (a.rows < 0 || a.tokens < 0 || a.judged_count < 0) return fail(HEADRACE_INVALID, "a count is negative");
    int64_t tokens = 0;
    for (int row = 0; row < a.rows; row++) {
        const int64_t start = a.starts[row], end = start + a.lengths[row];
        if (start < 0 || a.lengths[row] < 1)
            return fail(HEADRACE_INVALID, "row %d has %d tokens from %d", row, a.lengths[row], a.starts[row]);
        if (end > m.config.rope_positions)
            return fail(HEADRACE_INVALID, "row %d ends at %lld; the rope tables hold %d positions", row,
                        static_cast<long long>(end), m.config.rope_positions);
        const int64_t blocks = (end + kBlockTokens - 1) / kBlockTokens;
        if (blocks > a.table_width)
            return fail(HEADRACE_INVALID, "row %d needs %lld blocks of %d", row, static_cast<long long>(blocks),
                        a.table_width);
        for (int64_t i = 0; i < blocks; i++) {
            const int32_t block = a.block_tables[static_cast<int64_t>(row) * a.table_width + i];
            if (block < 0 || block >= m.num_blocks)
                return fail(HEADRACE_INVALID, "block %d of a pool of %lld", block,
                            static_cast<long long>(m.num_blocks));
        }
        tokens += a.lengths[row];
    }
    if (tokens != a.tokens)
        return fail(HEADRACE_INVALID, "%d tokens, but lengths sum to %lld", a.tokens, static_cast<long long>(tokens));
    for (int i = 0; i < a.tokens; i++)
        if (a.token_ids[i] < 0 || a.token_ids[i] >= m.config.vocab_size)
            return fail(HEADRACE_INVALID, "token id %lld of a vocabulary of %d", static_cast<long long>(a.token_ids[i]),
                        m.config.vocab_size);
    for (int i = 0; i < a.judged_count; i++)
        if (a.judged[i] < 0 || a.judged[i] >= a.tokens)
            return fail(HEADRACE_INVALID, "judged token %lld of %d", static_cast<long long>(a.judged[i]), a.tokens);
    return HEADRACE_OK;
}

int check_packed(int32_t type, int64_t rows, int64_t columns, const void *packed, PackedMatrix &matrix) {
    if (!packed_bytes(type, rows, columns))
        return fail(HEADRACE_INVALID, "type %d cannot hold a matrix of %lld x %lld", type, static_cast<long long>(rows),
                    static_cast<long long>(columns));
    if (reinterpret_cast<uintptr_t>(packed) % HEADRACE_ALIGNMENT)
        return fail(HEADRACE_INVALID, "packed data is not aligned to %d bytes", HEADRACE_ALIGNMENT);
    matrix = {find_format(type), rows, columns, static_cast<const uint8_t *>(packed)};
    return HEADRACE_OK;
}

}  // namespace

const char *headrace_error_message(void) { return last_error.c_str(); }

const char *headrace_isa(void) {
    const Level *level = choose_level();
    return level ? level->name : "none";
}

int headrace_team_create(int32_t threads, headrace_team **team) {
    if (threads < 0 || threads > 1024) return fail(HEADRACE_INVALID, "%d threads", threads);
    try {
        *team = new headrace_team(threads);
    } catch (const std::system_error &error) {
        return fail(HEADRACE_NO_MEMORY, "no more threads: %s", error.what());
    }
    return HEADRACE_OK;
}

int32_t headrace_team_threads(const headrace_team *team) { return team->threads(); }

void headrace_team_destroy(headrace_team *team) { delete team; }

double headrace_stream_rate(headrace_team *team, const void *data, size_t bytes, int32_t repeats) {
    const size_t piece_bytes = std::clamp<size_t>(bytes / (team->threads() * 8) / 64 * 64, 1 << 14, 1 << 20);
    const auto *words = static_cast<const uint64_t *>(data);
    std::atomic<uint64_t> sink{0};
    double best = 0;
    for (int repeat = 0; repeat < repeats; repeat++) {
        const auto start = std::chrono::steady_clock::now();
        team->run([&](int) {
            team->for_each(static_cast<int64_t>((bytes + piece_bytes - 1) / piece_bytes), [&](int64_t piece) {
                const size_t first = piece * piece_bytes / 8, end = std::min(first + piece_bytes / 8, bytes / 8);
                uint64_t sum[8] = {};
                for (size_t i = first; i + 8 <= end; i += 8)
                    for (int lane = 0; lane < 8; lane++) sum[lane] ^= words[i + lane];
                for (const uint64_t lane : sum) sink.fetch_xor(lane, std::memory_order_relaxed);
            });
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(bytes) / seconds.count());
    }
    return best;
}

size_t headrace_packed_bytes(int32_t packed_type, int64_t rows, int64_t columns) {
    return packed_bytes(packed_type, rows, columns);
}

int headrace_pack(headrace_team *team, int32_t source_type, int32_t packed_type, int64_t rows, int64_t columns,
                  const void *source, size_t source_bytes, const int32_t *row_order, void *target) {
    if (!can_pack(source_type, packed_type))
        return fail(HEADRACE_INVALID, "type %d cannot become type %d", source_type, packed_type);
    PackedMatrix matrix;
    if (const int status = check_packed(packed_type, rows, columns, target, matrix)) return status;
    const size_t row_bytes = source_row_bytes(source_type, columns);
    if (!row_bytes)
        return fail(HEADRACE_INVALID, "type %d cannot hold rows of %lld", source_type, static_cast<long long>(columns));
    if (source_bytes < row_bytes * rows)
        return fail(HEADRACE_INVALID, "%zu bytes of source, %zu needed", source_bytes, row_bytes * rows);
    for (int64_t row = 0; row_order && row < rows; row++)
        if (row_order[row] < 0 || (row_order[row] + 1) * row_bytes > source_bytes)
            return fail(HEADRACE_INVALID, "source row %d is not there", row_order[row]);
    pack_matrix(*team, source_type, matrix, static_cast<const uint8_t *>(source), row_order);
    return HEADRACE_OK;
}

int headrace_unpack_rows(int32_t packed_type, int64_t rows, int64_t columns, const void *packed, const int64_t *wanted,
                         int64_t count, float *out) {
    PackedMatrix matrix;
    if (const int status = check_packed(packed_type, rows, columns, packed, matrix)) return status;
    for (int64_t i = 0; i < count; i++) {
        if (wanted[i] < 0 || wanted[i] >= rows)
            return fail(HEADRACE_INVALID, "row %lld of %lld", static_cast<long long>(wanted[i]),
                        static_cast<long long>(rows));
        unpack_row(matrix, wanted[i], out + i * columns);
    }
    return HEADRACE_OK;
}

int headrace_linear(headrace_team *team, int32_t packed_type, int64_t rows, int64_t columns, const void *packed,
                    const float *x, int32_t m, float *out) {
    const Level *level = choose_level();
    if (!level) return fail(HEADRACE_NOT_AVAILABLE, "this CPU has no level of the library");
    Linear linear;
    linear.parts.resize(1);
    if (const int status = check_packed(packed_type, rows, columns, packed, linear.parts[0])) return status;
    ActivationBuffer buffer;
    buffer.shape(*level, {&linear});
    if (!buffer.reserve(*level, m, team->threads())) return no_memory();
    const int64_t strips = linear.parts[0].strips(), panels = (strips + kPanelStrips - 1) / kPanelStrips;
    team->run([&](int) {
        alignas(64) float panel[kPanelRows * kPanelWidth];
        level->begin();
        team->for_each(m, [&](int64_t row) { level->prepare(x + row * columns, row, buffer.view); });
        team->for_each(panels, [&](int64_t index) {
            const int64_t strip = index * kPanelStrips, column = strip * kTileOutputs;
            const int count = static_cast<int>(std::min<int64_t>(kPanelStrips, strips - strip));
            for (int64_t row = 0; row < m; row += kPanelRows) {
                const int here = static_cast<int>(std::min<int64_t>(kPanelRows, m - row));
                level->product(linear.parts[0], buffer.view, row, here, strip, count, panel);
                level->store(panel, here, static_cast<int>(std::min<int64_t>(count * kTileOutputs, rows - column)),
                             nullptr, out + row * rows + column, rows);
            }
        });
        level->end();
    });
    return HEADRACE_OK;
}

int headrace_model_create(const headrace_config *config, headrace_team *team, headrace_model **model) {
    if (const int status = check_config(*config)) return status;
    const Level *level = choose_level();
    if (!level) return fail(HEADRACE_NOT_AVAILABLE, "this CPU has no level of the library");
    try {
        *model = new headrace_model(*config, *team, *level);
    } catch (const std::bad_alloc &) {
        return no_memory();
    }
    return HEADRACE_OK;
}

int headrace_attach_matrix(headrace_model *model, int32_t matrix, int32_t layer, int32_t part, int32_t packed_type,
                           int64_t rows, int64_t columns, const void *packed) {
    Linear *linear = model->linear(matrix, layer);
    if (!linear || part < 0 || part >= static_cast<int>(linear->parts.size()))
        return fail(HEADRACE_INVALID, "no part %d of matrix %d in layer %d", part, matrix, layer);
    PackedMatrix &at = linear->parts[part], given;
    if (rows != at.rows || columns != at.columns)
        return fail(HEADRACE_INVALID, "matrix %d of layer %d, part %d: %lld x %lld, not %lld x %lld", matrix, layer,
                    part, static_cast<long long>(rows), static_cast<long long>(columns),
                    static_cast<long long>(at.rows), static_cast<long long>(at.columns));
    if (const int status = check_packed(packed_type, rows, columns, packed, given)) return status;
    at = given;
    model->completed = false;
    return HEADRACE_OK;
}

int headrace_attach_vector(headrace_model *model, int32_t vector, int32_t layer, const float *values, int64_t count) {
    int64_t wanted = 0;
    std::vector<float> *at = model->vector(vector, layer, wanted);
    if (!at) return fail(HEADRACE_INVALID, "no vector %d in layer %d", vector, layer);
    if (count != wanted)
        return fail(HEADRACE_INVALID, "vector %d of layer %d: %lld values, not %lld", vector, layer,
                    static_cast<long long>(count), static_cast<long long>(wanted));
    at->assign(values, values + count);
    model->completed = false;
    return HEADRACE_OK;
}

int headrace_model_complete(headrace_model *model) {
    const std::string missing = model->complete();
    return missing.empty() ? HEADRACE_OK : fail(HEADRACE_INVALID, "%s was not attached", missing.c_str());
}

size_t headrace_kv_block_bytes(const headrace_model *model) { return model->kv.block_bytes; }

int headrace_allocate_kv(headrace_model *model, int64_t num_blocks, int32_t block_size) {
    if (block_size != kBlockTokens)
        return fail(HEADRACE_INVALID, "blocks of %d tokens; this backend has blocks of %d", block_size, kBlockTokens);
    if (num_blocks < 1) return fail(HEADRACE_INVALID, "%lld blocks", static_cast<long long>(num_blocks));
    if (!model->pool.allocate(static_cast<size_t>(num_blocks * model->kv.block_bytes))) return no_memory();
    model->num_blocks = num_blocks;
    return HEADRACE_OK;
}

int headrace_reserve(headrace_model *model, int32_t max_tokens, int32_t max_rows) {
    if (!model->completed)
        if (const int status = headrace_model_complete(model)) return status;
    return model->reserve(max_tokens, std::max(max_rows, kPanelRows)) ? HEADRACE_OK : no_memory();
}

int headrace_step(headrace_model *model, const headrace_step_arguments *arguments) {
    if (const int status = check_step(*model, *arguments)) return status;
    if (const int status = headrace_reserve(model, arguments->tokens, arguments->rows)) return status;
    const size_t kept = static_cast<size_t>(arguments->judged_count) * model->config.hidden_size * 4;
    if (!model->work.judged.reserve(kept)) return no_memory();
    try {
        run_step(*model, *arguments);
    } catch (const std::bad_alloc &) {
        return no_memory();
    }
    model->judged_count = arguments->judged_count;
    return HEADRACE_OK;
}

int headrace_judged_logits(headrace_model *model, int32_t first, int32_t count, float *logits) {
    if (first < 0 || count < 0 || first + count > model->judged_count)
        return fail(HEADRACE_INVALID, "judged tokens %d to %d of %lld", first, first + count,
                    static_cast<long long>(model->judged_count));
    if (const int status = headrace_reserve(model, 1, count)) return status;
    run_judged(*model, first, count, logits);
    return HEADRACE_OK;
}

int headrace_clear_blocks(headrace_model *model, const int32_t *blocks, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (blocks[i] < 0 || blocks[i] >= model->num_blocks)
            return fail(HEADRACE_INVALID, "block %d of a pool of %lld", blocks[i],
                        static_cast<long long>(model->num_blocks));
    for (int32_t i = 0; i < count; i++)
        __builtin_memset(model->pool.data() + blocks[i] * model->kv.block_bytes, 0, model->kv.block_bytes);
    return HEADRACE_OK;
}

void headrace_model_destroy(headrace_model *model) { delete model; }
