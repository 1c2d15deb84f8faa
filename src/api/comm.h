// ---- several processes --------------------------------------------------------------------------
// Processes that train together have the same model, settings and batches; each computes a share
// of the micro-batches of a step. The result has the same bits for any number of processes.
// Left out by QLORA_NO_TRAIN as well.

// Bytes for another process, or from it.
typedef struct qlora_message {
    void* data;
    size_t bytes; // at least 1
    int32_t peer; // rank of the other process
    bool receive; // otherwise sent
} qlora_message;

// How the processes reach each other: qlora_comm_mpi, qlora_comm_nccl, or functions of the program.
typedef struct qlora_comm {
    int32_t rank;  // of this process, from 0
    int32_t world; // number of processes, at most 4096; 0 or 1 = this one alone
    bool device;   // messages are in device memory and are exchanged on a CUstream, in its order
    bool graph;    // with `device`: exchange only queues work that a CUDA graph can contain. It is
                   // captured, and the graph is launched in later steps; clear it to avoid that
    // Sends and receives all messages. Those from one process to another arrive in the order of
    // both lists, which have the same sizes. Returns false after a failure, with a reason in `why`.
    // In device memory, it may return before the messages have arrived; count 0 then says that time
    // limits start again, because a graph is about to be launched or the device still computes.
    bool (*exchange)(const qlora_message* messages, int64_t count, void* stream, char* why,
                     size_t why_size, void* user);
    // Called again and again while a call of the trainer waits for exchanges in device memory:
    // false if they cannot succeed any more, with the reason. NULL = not needed. Other calls that
    // wait for the device do not ask: query a step before evaluating or reading parameters.
    bool (*alive)(char* why, size_t why_size, void* user);
    // Changes how long an exchange may take, in seconds; 0 = as at first. NULL = there is no limit.
    void (*limit)(double seconds, void* user);
    // Ends the other processes after an error, where the provider can. NULL = it cannot.
    void (*abort)(void* user);
    void (*close)(void* user); // frees what the provider allocated; NULL = nothing
    void* user;
} qlora_comm;

// Gives every process the bytes of all: `all` receives world * bytes, in the order of the ranks.
// Every process must make the same call. Waits for all of them.
QLORA_API qlora_result qlora_comm_gather(qlora_ctx* ctx, const qlora_comm* comm, const void* mine,
                                         size_t bytes, void* all);
// A provider for host memory: MPI, opened at run time. Call it in every process that a launcher
// such as mpirun started, before other libraries start threads or open the GPU. library is a path;
// if it is NULL, it is the value of QLORA_MPI_LIBRARY, or else Open MPI, MPICH or the MPI 5.0
// interface, as the variables of the launcher suggest. An exchange may take `limit` seconds, or 600
// if that is 0. After a failure, `why` has the reason.
QLORA_API qlora_result qlora_comm_mpi(const char* library, double limit, qlora_comm* out, char* why,
                                      size_t why_size);

// A provider for device memory: NCCL 2.18 or later, opened at run time. Its exchanges are captured
// in graphs, unless QLORA_NCCL_GRAPH is 0 in the environment.
#define QLORA_NCCL_ID_BYTES 128
// Zero it before setting fields.
typedef struct qlora_nccl_desc {
    uint32_t reserved_must_be_zero0;
    int32_t rank;
    int32_t world;
    const void* id;      // QLORA_NCCL_ID_BYTES bytes, made by one process and handed to the others
    const char* library; // path; NULL = the value of QLORA_NCCL_LIBRARY, or the usual names
    double limit;        // seconds that a call or an exchange may take; 0 = 600
    uint32_t reserved_must_be_zero1;
} qlora_nccl_desc;
// Makes an id. The process must live until all others have called qlora_comm_nccl. After a failure,
// `why` has the reason.
QLORA_API qlora_result qlora_nccl_id(const char* library, void* id, char* why, size_t why_size);
// Waits for all processes. Close the provider before the context is destroyed.
QLORA_API qlora_result qlora_comm_nccl(qlora_ctx* ctx, const qlora_nccl_desc* desc,
                                       qlora_comm* out);
// Ends the use of a provider. comm may be NULL.
QLORA_API void qlora_comm_close(qlora_comm* comm);
