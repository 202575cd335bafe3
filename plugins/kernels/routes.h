// Which kernels compute a block: one table, whose first row that fits wins.
#pragma once

#include "host/launch.h"
#include "host/trace.h"
#include "twell/twell.h"

namespace twell {

enum class Route {
    kOneOrTwoTokens,  // each CTA adds what its neurons contribute to y
    kFewTokens,       // a token's work is spread over the device
    kDenseBlock,      // all neurons, whatever is active
    kManyTokens,      // the gate packs what is active, and a guard decides which rows are too dense for that
};

// The device is one that has kernels: of compute capability 8.0 or later.
Route choose_route(twell_problem const& problem, Device const& device);

char const* name_of(Route route);

// The table, as Markdown.
void list_routes(Text& text);

}  // namespace twell
