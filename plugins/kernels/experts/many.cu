#include "experts/many.cuh"
#include "experts/many.h"
#include "host/problem.h"

namespace twell {

namespace {

using namespace experts;

template <class Element, class Stored, int kMatrices, int kM>
cudaError_t launch_up(ExpertsCall const& call, UpParams const& params) {
    using Shape = Many<kM>;
    dim3 const grid(static_cast<unsigned>(ceil_div(many_pitch(params.d_ff), Shape::kN / kMatrices)),
                    static_cast<unsigned>(params.groups.most_groups));
    return launch_dependent({kMatrices == 2 ? "experts_many_gate_up" : "experts_many_up", {{"tokens", kM}}},
                            many_up_kernel<Element, Stored, kMatrices, kM>, params, grid, kManyThreads,
                            Shape::kStages * Shape::kStageBytes, call.device, call.stream);
}

template <class Element, class Stored, int kM>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down) {
    using Shape = Many<kM>;
    TWELL_TRY(call.problem.variant == TWELL_GATED ? launch_up<Element, Stored, 2, kM>(call, up)
                                                  : launch_up<Element, Stored, 1, kM>(call, up));
    dim3 const grid(static_cast<unsigned>(ceil_div(down.d_out, Shape::kN)),
                    static_cast<unsigned>(down.groups.most_groups));
    return launch_dependent({"experts_many_down", {{"tokens", kM}}}, many_down_kernel<Element, Stored, kM>, down, grid,
                            kManyThreads, Shape::kStages * Shape::kStageBytes, call.device, call.stream);
}

template <class Element, class Stored>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down, int width) {
    return width == 64 ? launch<Element, Stored, 64>(call, up, down) : launch<Element, Stored, 128>(call, up, down);
}

template <class Element>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down, int width) {
    return call.problem.weight_dtype == TWELL_E4M3 ? launch<Element, E4m3>(call, up, down, width)
                                                   : launch<Element, uint16_t>(call, up, down, width);
}

}  // namespace

int experts_many_pitch(int d_ff) { return many_pitch(d_ff); }

cudaError_t launch_experts_many(ExpertsCall const& call, UpParams const& up, DownParams const& down, int width) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, up, down, width) : launch<Fp16>(call, up, down, width);
}

void list_experts_many(Text& text) {
    for (int const width : {64, 128}) {
        for (char const* const name : {"experts_many_up", "experts_many_gate_up", "experts_many_down"}) {
            text.add("%s tokens=%d\n", name, width);
        }
    }
}

}  // namespace twell
