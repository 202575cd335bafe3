// Chunks: what chunk_up.cuh multiplies, pairs of a row and an active neuron that lie in one block of neurons.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "format/schedule.cuh"
#include "host/launch.h"
#include "many_tokens/chunks/hot.h"
#include "twell/twell.h"

namespace twell {

// A multiprocessor holds kSlabColumns columns of Wu of a block of neurons in shared memory.
constexpr int kSlabColumns = 64;
constexpr int kMostBlockNeurons = 1472;
constexpr int kMostNeuronBlocks = 16;
// Behind the blocks of neurons that lie side by side comes one of the hot neurons, whose u are another kernel's.
constexpr int kMostBlocks = kMostNeuronBlocks + 1;

// A chunk has pairs of up to eight rows: kOctets octets with pairs of two rows each.
constexpr int kOctetPairs = 8;
constexpr int kOctets = 4;
constexpr int kChunkPairs = kOctetPairs * kOctets;
constexpr int kRowsOfOctet = 2;
constexpr int kRowsOfChunk = kRowsOfOctet * kOctets;

// kRunRows neighbouring rows, a run, share their chunks. They have at most kRunChunks for each block of neurons on
// average, and kRunChunksOfBlock for any; also for the hot neurons', which do not count towards the average.
constexpr int kRunRows = 64;
constexpr int kRunChunks = 25;
constexpr int kRunChunksOfBlock = 50;

constexpr uint32_t kSecondRow = 1u << 31;  // in an entry: the pair is of the second of the octet's rows

struct Chunk {
    // Pair i of octet o is word i * kOctets + o: the neuron's number in the block, and maybe kSecondRow.
    uint32_t entries[kChunkPairs];
    uint32_t rows[kRowsOfChunk];  // of x
    // Pair i of octet o is word o * kOctetPairs + i: the place in the row's list in the low half, and the bits of g in
    // the high half; or kNoPair.
    uint32_t items[kChunkPairs];
};
constexpr uint32_t kNoPair = 0xffffffffu;
// The bytes of a chunk that the product needs.
constexpr int kChunkFrontBytes = offsetof(Chunk, items);
static_assert(kChunkFrontBytes % sizeof(uint4) == 0 && sizeof(Chunk) % sizeof(uint4) == 0, "copied in vectors");

// Where chunks lie in a piece of device memory of chunk_bytes(problem), 256-byte aligned. Without memory there are
// none.
struct Chunks {
    uint32_t* counts;  // [num_blocks + 1]: chunks of each block of neurons
    Chunk* chunks;     // [num_blocks + 1, block_capacity]
    float* sums;       // [chunks of all but the last, block by block, num_slabs, kChunkPairs]: parts of x . Wu[n]
    HotNeurons hot;    // of the last block; without memory there are none
    uint32_t block_capacity;  // the most chunks of a block
    int num_blocks;           // of neurons, without the last one
    int block_neurons;
    uint32_t inverse;  // of block_neurons: 2^32 / block_neurons, rounded up
    int num_slabs;
};

// The use of chunks in a call, chosen once. Kernels::kSm90: wherever it is possible.
struct ChunkConfig {
    bool exists;   // rows of the sparse path are multiplied by chunks
    bool has_hot;  // and neurons may be hot
    int parts;     // in which the chunks of a block of neurons are shared out
};

ChunkConfig choose_chunks(twell_problem const& problem, Device const& device, Kernels kernels);

// The non-zeros of a row that find a place in chunks, on average.
float nonzeros_in_chunks(twell_problem const& problem);

// The fewest tokens of a call with chunks.
constexpr int64_t kFewestTokensChunks = 4096;

// Never shrinks when `tokens` grows; the same on every device.
size_t chunk_bytes(twell_problem const& problem);

// No memory if there are no chunks.
Chunks chunks_at(twell_problem const& problem, ChunkConfig const& config, void* memory);

// Enqueue the products of chunks, behind the schedule; and hot.u = x hot.w_up^T behind that, unless no neuron is hot or
// all rows are dense.
cudaError_t launch_chunk_up(Call const& call, Schedule const& schedule, Chunks const& chunks,
                            ChunkConfig const& config);

// The rows of the configurations, a line each.
void list_chunks(Text& text);

}  // namespace twell
