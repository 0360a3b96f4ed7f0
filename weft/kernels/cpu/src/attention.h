// A batch's attention as tasks: which kernel a row takes follows from the row alone.
#pragma once

#include "memory.h"
#include "prefill.h"
#include "threads.h"

namespace weft {
namespace {

constexpr int kTaskRun = 8;  // tasks that a thread takes at once: it fetches for the next one while it ends the last

// One task: queries [first, first + count) of a row for one KV head, or chunk `first` of a row with few queries.
struct Task {
    int32_t row;
    int32_t head;
    int32_t first;
    int32_t count;  // 0: a row with few queries
};

inline int64_t stacked(const AttentionArgs& a, int64_t r) {
    return (a.batch->q_indptr[r + 1] - a.batch->q_indptr[r]) * (a.heads.num_heads / a.heads.num_kv_heads);
}

// Fills `tasks` if it is not null; returns how many there are. Tiles come first, the longest ones in front, so that
// threads finish together.
inline int64_t list_tasks(const AttentionArgs& a, Task* tasks) {
    int64_t group = a.heads.num_heads / a.heads.num_kv_heads, n = 0;
    int64_t step = most<int64_t>(1, kTileRows / group);
    for (int few = 0; few < 2; few++)
        for (int64_t r = 0; r < a.batch->num_rows; r++) {
            int64_t queries = a.batch->q_indptr[r + 1] - a.batch->q_indptr[r];
            if (queries == 0 || (stacked(a, r) <= kMaxStacked) != (bool)few) continue;
            int64_t blocks = few ? 1 : (queries + step - 1) / step;
            for (int64_t b = blocks - 1; b >= 0; b--)
                for (int64_t head = 0; head < a.heads.num_kv_heads; head++, n++)
                    if (tasks)
                        tasks[n] = Task{(int32_t)r, (int32_t)head, (int32_t)(b * step),
                                        few ? 0 : (int32_t)least(step, queries - b * step)};
        }
    return n;
}

// One long row with few heads: its chunks are shared among threads and joined in order afterwards.
template <class T, bool Wide>
void attend_split(const AttentionArgs& a, const Task* tasks, int64_t num_tasks) {
    for (int64_t t = 0; t < num_tasks; t++) {
        Stack<T> stack;
        stack_of(a, tasks[t].row, tasks[t].head, stack);
        int64_t chunks = num_chunks(stack.all);
        Memory memory;
        Partial* parts = (Partial*)memory.at_least(sizeof(Partial) * (size_t)(chunks + 1));
        for_each(a.threads, chunks, [&](int64_t c) {
#if WEFT_AMX
            TileUnit in_use;
#endif
            Range range = chunk_range(stack.all, c);
            const T* next[kAhead] = {};
            attend_chunk<T, Wide>(a, stack, range.begin, range.end, next, parts[c]);
        });
        Partial& result = parts[chunks];
        clear(result, stack.count, a.heads.head_dim);
        for (int64_t c = 0; c < chunks; c++) join(result, parts[c], stack.count, a.heads.head_dim);
        write_out<T, Wide>(a, stack, result);
    }
}

// Reads every shared chunk once and leaves the partial results of its members in `parts`.
template <class T, bool Wide>
void attend_shared(const AttentionArgs& a, SharedParts& parts) {
    static thread_local Memory memory;
    const Batch& batch = *a.batch;
    const int64_t num_members = batch.group_indptr[batch.num_groups], heads = a.heads.num_kv_heads;
    for (int64_t m = 0; m < num_members; m++) parts.stacked = most(parts.stacked, stacked(a, batch.members[m]));
    const int64_t floats = num_members * heads * parts.stacked * (a.heads.head_dim + 2);
    parts.data = (float*)memory.at_least((size_t)floats * sizeof(float));
    for_each_when_free(a.threads, batch.num_groups * heads, 1,
                       [&](int64_t task) { attend_group<T, Wide>(a, task / heads, task % heads, parts); });
}

template <class T, bool Wide>
void attend(const AttentionArgs& a) {
    int64_t num_tasks = list_tasks(a, nullptr);
    Memory memory;
    Task* tasks = (Task*)memory.at_least(sizeof(Task) * (size_t)num_tasks + 1);
    list_tasks(a, tasks);
    bool all_few = num_tasks > 0 && tasks[0].count == 0;
    SharedParts parts;
    if (a.batch->num_groups) {
        attend_shared<T, Wide>(a, parts);
    } else if (all_few && a.threads > 1 && num_tasks < a.threads)
        return attend_split<T, Wide>(a, tasks, num_tasks);
    int64_t entries = 0;
    for (int64_t r = 0; r < a.batch->num_rows; r++) entries += a.batch->kv_lens[r];
    int64_t work = entries * a.heads.num_kv_heads * a.heads.head_dim;
    // Which thread takes a task does not matter to its result; taking them one by one evens out their lengths.
    for_each_when_free(threads_for(work, a.threads), num_tasks, kTaskRun, [&](int64_t t) {
        const Task& task = tasks[t];
        if (task.count == 0) {
            bool more = t + 1 < num_tasks;
            attend_stack<T, Wide>(a, task.row, task.head, more ? tasks[t + 1].row : -1, more ? tasks[t + 1].head : -1,
                                  parts);
        } else {
            static thread_local Memory tile_memory;
            Tile<T>* tile = (Tile<T>*)tile_memory.at_least(sizeof(Tile<T>));
            attend_tile<T>(a, task.row, task.head, task.first, task.count, *tile);
        }
    });
}

}  // namespace
}  // namespace weft
