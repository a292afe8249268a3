// Rows of memory that hold several sequences: where each begins, as cuDNN wants to know it, and what lies between them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace te {

// Where sequences begin in x [rows, tokens, ..], of `token` elements a token. Sequences are [rows, most].
struct PackedRows {
  const int32_t* start;  // [rows, most] the token in its row, below 0 where there is none
  int64_t tokens, token;
  int64_t* offset;  // [rows * most + 1] elements; the last is where x ends
};

// Device memory of the offsets of `sequences`, rounded up so that what follows is aligned.
inline int64_t offset_bytes(int64_t sequences) { return (8 * (sequences + 1) + 255) / 256 * 256; }

// Writes the offsets of three arrays.
cudaError_t write_offsets(cudaStream_t stream, int64_t rows, int64_t most, PackedRows a, PackedRows b, PackedRows c);

// Writes zeros where no sequence is in x [rows, tokens, token bytes], or NaN in rows that are not `kept`, where that is
// given; start and length are s32[rows, most].
cudaError_t write_between(cudaStream_t stream, int64_t rows, int64_t most, const int32_t* start, const int32_t* length,
                          const bool* kept, int64_t tokens, int64_t token_bytes, void* x);

}  // namespace te
