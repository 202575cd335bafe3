// Functions that the library exports for its own tests and benchmarks: they choose kernels that the routes would not,
// and look at what kernels leave for each other. They check less than those of twell.h, and may change from build to
// build.
#ifndef TWELL_KERNELS_INTERNAL_H_
#define TWELL_KERNELS_INTERNAL_H_

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "twell/twell.h"

#if defined(__cplusplus)
extern "C" {
#endif

// The kernels that a call runs.
typedef enum {
    TWELL_RUN_ROUTES = 0,  // as twell_mlp
    TWELL_RUN_GATE = 1,    // as twell_gate: the workspace is the packed matrix
    TWELL_RUN_MANY_TOKENS =
        2,                // the route many_tokens, for any number of tokens; the guard decides which rows are dense
    TWELL_RUN_EARLY = 3,  // the same, but all rows are dense, as after an early decision
    TWELL_RUN_DENSE_ROWS = 4,   // the same, but with dense_rows rows on the dense path, see GuardOrder in guard.h
    TWELL_RUN_DENSE_BLOCK = 5,  // the route dense_block, without a launch that skips neurons
    TWELL_RUN_SPLIT = 6         // split by the problem's hint
} twell_internal_path;

// Which kernels run, if there are several.
typedef enum {
    TWELL_KERNELS_BEST = 0,
    TWELL_KERNELS_GENERIC = 1,
    TWELL_KERNELS_SM90 = 2  // cudaErrorNotSupported if they cannot run
} twell_internal_kernels;

typedef struct {
    int32_t path;     // twell_internal_path
    int32_t kernels;  // twell_internal_kernels; of TWELL_RUN_ROUTES and TWELL_RUN_DENSE_BLOCK the best ones always run
    int64_t dense_rows;  // of TWELL_RUN_DENSE_ROWS
} twell_internal_choice;

// Runs a choice. The workspace is that of twell_mlp, or for TWELL_RUN_GATE of twell_gate.
TWELL_API cudaError_t twell_internal_run(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                                         twell_internal_choice const* choice, cudaStream_t stream);

// twell_describe of such a call.
TWELL_API size_t twell_internal_describe(twell_problem const* problem, twell_device const* device,
                                         twell_internal_choice const* choice, char* text, size_t size);

// The order in which step 2 takes rows, if only those without a list are dense. `packed` and `spilled`: see
// format/pack.cuh. `memory`: twell_internal_schedule_bytes, 256-byte aligned; it then holds a twell::ScheduleHeader
// and, from byte 256 on, the rows in order.
TWELL_API size_t twell_internal_schedule_bytes(twell_problem const* problem);
TWELL_API cudaError_t twell_internal_schedule(twell_problem const* problem, uint32_t const* packed,
                                              uint16_t const* spilled, void* memory, cudaStream_t stream);

// Runs twell_linear with `kernels`, of twell_internal_kernels, for products of many tokens.
TWELL_API cudaError_t twell_internal_linear(twell_linear_problem const* problem, twell_linear_tensors const* tensors,
                                            void* workspace, int32_t kernels, cudaStream_t stream);

// twell_workspace_bytes on a device.
TWELL_API size_t twell_internal_workspace_bytes(twell_problem const* problem, twell_device const* device);

// The table of routes, as Markdown; and the rows of all tables of configurations: a line each, what twell_describe says
// of a launch before the bar. They return what twell_describe does.
TWELL_API size_t twell_internal_routes(char* text, size_t size);
TWELL_API size_t twell_internal_configurations(char* text, size_t size);

// Where a call of the path TWELL_RUN_MANY_TOKENS leaves how many neurons are hot, in device memory, and 256 bytes
// behind it which ones; null if none may be.
TWELL_API uint32_t const* twell_internal_hot_neurons(twell_problem const* problem, void* workspace, int32_t kernels);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_KERNELS_INTERNAL_H_
