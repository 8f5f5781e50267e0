// One launch that brings a batch into the static buffers: blockIdx.y is the input, blockIdx.z and blockIdx.x share out
// its slices and their bytes. It knows bytes, not types. `copy_kernel.py` packs the structs and defines INPUTS.

typedef unsigned long long u64;
typedef unsigned int u32;

struct __align__(16) Job {
    u64 pattern[2];  // the padding value, repeated
    u64 target;      // address of the static buffer
    u64 pitch;       // bytes from one slice to the next; there is a slice for each index in front of the row dimension
    u64 bytes;       // of a slice of the batch; in the source, slices follow one another
    u64 row_bytes;   // of a row within a slice
    u32 slices;
    u32 counts;      // what its rows count: 0 nothing, 1 tokens, 2 requests
    u32 factor;      // rows = factor * count + offset
    u32 offset;
    u32 least_rows;  // rows up to here are made padding in any case
    u32 last;        // padding repeats the batch's last row, not the pattern
};

struct Batch {
    u32 tokens, reqs;                  // of the batch before: rows behind it are padding
    u32 exposed_tokens, exposed_reqs;  // what the caller may have written at any time
    u64 sources[INPUTS];               // equal to the target: the batch is there, padding alone is due
    Job jobs[INPUTS];
};

// A small batch that comes from the host rides in the kernel's arguments, which may have 4 KiB in all.
struct __align__(16) InlineBatch {
    Batch batch;  // sources are offsets into the values
    char values[4096 - sizeof(Batch)];
};

// No division by what the compiler does not know: it is slow to run, and slower to compile.
template <typename Unit>
__device__ void copy_slice(const Job& job, const char* source, char* target, u64 end) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 units = job.bytes / sizeof(Unit), all = end / sizeof(Unit), in_row = job.row_bytes / sizeof(Unit);
    const Unit* from = (const Unit*)source;
    Unit* to = (Unit*)target;
    if (from != to) {
        for (u64 i = thread; i < units; i += threads) to[i] = from[i];
    }
    if (!job.last) {
        for (u64 i = units + thread; i < all; i += threads) {
            to[i] = *(const Unit*)((const char*)job.pattern + (i * sizeof(Unit) & 15));
        }
    } else if (in_row == 1) {
        for (u64 i = units + thread; i < all; i += threads) to[i] = from[units - 1];
    } else {
        for (u64 row = units + blockIdx.x * in_row; row < all; row += gridDim.x * in_row) {
            for (u64 i = threadIdx.x; i < in_row; i += blockDim.x) to[row + i] = from[units - in_row + i];
        }
    }
}

template <typename Unit>
__device__ void copy_slices(const Job& job, u64 source, u64 end) {
    const u64 pitch = source == job.target ? job.pitch : job.bytes;
    for (u64 slice = blockIdx.z; slice < job.slices; slice += gridDim.z) {
        copy_slice<Unit>(job, (const char*)source + slice * pitch, (char*)job.target + slice * job.pitch, end);
    }
}

__device__ void copy_input(const Batch& batch, u32 input, u64 source) {
    const Job& job = batch.jobs[input];
    u64 rows = job.least_rows;
    if (job.counts && !job.last) {
        const u32 before = job.counts == 1 ? batch.tokens : batch.reqs;
        const u32 exposed = job.counts == 1 ? batch.exposed_tokens : batch.exposed_reqs;
        const u64 reach = (u64)job.factor * (before > exposed ? before : exposed) + job.offset;
        rows = reach > rows ? reach : rows;
    }
    const u64 end = rows * job.row_bytes > job.bytes ? rows * job.row_bytes : job.bytes;
    // The widest unit that all addresses and lengths are multiples of.
    const u64 lengths = job.bytes | end | (job.slices > 1 ? job.pitch : 0) | (job.last ? job.row_bytes : 0);
    const u64 bits = job.target | source | lengths;
    if (bits % 16 == 0) {
        copy_slices<uint4>(job, source, end);
    } else if (bits % 4 == 0) {
        copy_slices<u32>(job, source, end);
    } else if (bits % 2 == 0) {
        copy_slices<unsigned short>(job, source, end);
    } else {
        copy_slices<unsigned char>(job, source, end);
    }
}

extern "C" __global__ void copy_rows(const __grid_constant__ Batch batch) {
    copy_input(batch, blockIdx.y, batch.sources[blockIdx.y]);
}

extern "C" __global__ void copy_rows_inline(const __grid_constant__ InlineBatch batch) {
    copy_input(batch.batch, blockIdx.y, (u64)batch.values + batch.batch.sources[blockIdx.y]);
}
