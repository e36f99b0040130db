"""What an exit meant: one line for every row of the table, and the choice among many lines.

The llama.cpp lines about files, flags, ports and CPU buffers were captured from the program; most others are written after
the known wording of their engine and still wait for a captured one.
"""

from __future__ import annotations

import pytest

from greenroom.core.facts import Cause
from greenroom.engines.oom import ROWS, Class, classify, ending, ran_out

VLLM_REFUSAL = (
    "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.85 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
TORCH_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
    "1.20 GiB is free. Process 4711 has 70.00 GiB memory in use."
)

FIXTURES: tuple[tuple[str, Class, str], ...] = (
    ("vllm", Class.BUDGET, VLLM_REFUSAL),
    (
        "vllm",
        Class.BUDGET,
        "Available memory on node 0 (16.79/23.54 GiB) on startup is less than desired CPU memory utilization (0.99, 23.31 GiB)",
    ),
    ("vllm", Class.BUDGET, "Externally held weights (30.0 GiB) exceed the desired GPU memory utilization (0.5, 40.0 GiB)."),
    ("vllm", Class.BUDGET, "Free memory (10.00 GiB) is less than the engine's budget (12.50 GiB) after the held weights"),
    ("vllm", Class.SHARE, "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."),
    (
        "vllm",
        Class.SHARE,
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger "
        "than the available KV cache memory (9.1 GiB). It is larger: 131072 is larger than the available KV cache memory",
    ),
    (
        "vllm",
        Class.SHARE,
        "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (20000).",
    ),
    ("vllm", Class.SHARE, "Cannot auto-fit max_model_len: not even one block fits"),
    ("vllm", Class.DISTURBED, "AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current free memory 74.9 GiB."),
    ("vllm", Class.LOAD, "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests."),
    ("vllm", Class.DISTURBED, "AssertionError: Memory usage increased after sleeping."),
    ("vllm", Class.WAKE, "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
    ("vllm", Class.CRASH, "RuntimeError: CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:169"),
    ("vllm", Class.HOST, "ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."),
    ("vllm", Class.WRAPPER, "ERROR Worker proc VllmWorker-1 died unexpectedly, shutting down executor."),
    ("vllm", Class.WRAPPER, "ERROR EngineCore encountered a fatal error."),
    ("vllm", Class.WRAPPER, "EngineCore encountered an issue. See stack trace (above) for the root cause."),
    ("vllm", Class.WRAPPER, "vllm.v1.engine.exceptions.EngineDeadError: the engine is dead"),
    ("vllm", Class.WRAPPER, "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ("vllm", Class.WRAPPER, "ERROR WorkerProc failed to start."),
    ("vllm", Class.WRAPPER, "ERROR EngineCore failed to start."),
    ("vllm", Class.CONFIG, "ValueError: Sleep mode is not supported on current platform."),
    ("vllm", Class.CONFIG, "vllm: error: unrecognized arguments: --bogus"),
    ("vllm", Class.CONFIG, "vllm serve: error: argument --max-model-len: invalid value 'x'"),
    ("torch", Class.RUNTIME, TORCH_OOM),
    ("torch", Class.RUNTIME, "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB."),
    ("torch", Class.RUNTIME, "RuntimeError: XPU out of memory, please use `empty_cache`"),
    ("torch", Class.RUNTIME, "torch.cuda.OutOfMemoryError: allocation failed"),
    ("torch", Class.RUNTIME, "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("torch", Class.HOST, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
    (
        "llama.cpp",
        Class.LOAD,
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
    ),
    ("cuda", Class.HOST, "cudaHostAlloc failed: out of memory"),
    ("cuda", Class.RUNTIME, "CUDA error: out of memory"),
    ("cuda", Class.RUNTIME, "RuntimeError: cudaErrorMemoryAllocation"),
    ("cuda", Class.RUNTIME, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ("cuda", Class.RUNTIME, "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("cuda", Class.RUNTIME, "NCCL WARN Cuda failure 'out of memory'"),
    ("cuda", Class.RUNTIME, "RuntimeError: Triton Error [CUDA]: out of memory"),
    ("cuda", Class.CRASH, "CUDA error: an illegal memory access was encountered"),
    ("cuda", Class.CRASH, "RuntimeError: CUDA error: device-side assert triggered"),
    ("cuda", Class.CRASH, "CUDA error: unspecified launch failure"),
    ("cuda", Class.CRASH, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."),
    ("llama.cpp", Class.CONTEXT, "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"),
    ("llama.cpp", Class.CONTEXT, "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 8806465536"),
    ("llama.cpp", Class.CONTEXT, "llama_init_from_model: failed to allocate compute pp buffers"),
    ("llama.cpp", Class.CONTEXT, "graph_reserve: failed to reserve the graph"),
    ("llama.cpp", Class.LOAD, "llama_model_load: error loading model: unable to allocate Vulkan0 buffer"),
    ("llama.cpp", Class.LOAD, "E alloc_tensor_range: failed to allocate CPU buffer of size 1446010880"),
    ("llama.cpp", Class.LOAD, "ggml_backend_amx_buffer_type_alloc_buffer: failed to allocate buffer of size 1442840576"),
    ("llama.cpp", Class.HOST, "E llama_model_load: error loading model: mmap failed: Cannot allocate memory"),
    ("llama.cpp", Class.HARMLESS, "W llama_params_fit: failed to fit params to free device memory"),
    ("llama.cpp", Class.HARMLESS, "cannot meet free memory target on all devices"),
    ("llama.cpp", Class.HARMLESS, "projected to use 9000 MiB of device memory vs. 8000 MiB of free device memory"),
    ("llama.cpp", Class.HARMLESS, "decode: failed to find a memory slot for batch of size 512"),
    ("llama.cpp", Class.HARMLESS, "could not find a KV slot for the batch"),
    ("llama.cpp", Class.HARMLESS, "E srv send_error: Context size has been exceeded."),
    ("llama.cpp", Class.CONFIG, "E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file or directory)"),
    (
        "llama.cpp",
        Class.CONFIG,
        "error loading model: tensor 'output.weight' data is not within the file bounds, model is corrupted or incomplete",
    ),
    ("llama.cpp", Class.CONFIG, "E gguf_init_from_reader: invalid magic characters: 'garb', expected 'GGUF'"),
    ("llama.cpp", Class.CONFIG, "error loading model: error loading model architecture: unknown model architecture: 'new'"),
    ("llama.cpp", Class.CONFIG, "error: invalid argument: --bogus"),
    ("llama.cpp", Class.CONFIG, 'error while handling argument "-c": stoi'),
    ("llama.cpp", Class.PORT, "E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18702"),
    ("llama.cpp", Class.WRAPPER, "E cmn  common_init_: failed to create context with model '/m.gguf'"),
    ("llama.cpp", Class.WRAPPER, "E srv  llama_server: exiting due to model loading error"),
    ("llama.cpp", Class.WRAPPER, "E llama_model_load: error loading model: llama_model_loader: failed to load model from /m"),
    ("vulkan", Class.HOST, "vk::Device::allocateMemory: ErrorOutOfHostMemory"),
    ("vulkan", Class.LOAD, "vk::Device::allocateMemory: ErrorOutOfDeviceMemory"),
    ("vulkan", Class.LOAD, "ggml_vulkan: Device memory allocation of size 1073741824 failed."),
    ("vulkan", Class.LOAD, "VK_ERROR_OUT_OF_DEVICE_MEMORY"),
    ("vulkan", Class.HARMLESS, "ggml_vulkan: Failed to allocate pinned memory (ErrorOutOfHostMemory)"),
    ("vulkan", Class.CRASH, "terminate called after throwing an instance of 'vk::DeviceLostError'"),
    ("metal", Class.RUNTIME, "error: kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    ("metal", Class.RUNTIME, "Insufficient Memory (00000008:kIOGPU)"),
    ("metal", Class.CRASH, "ggml_metal_graph_compute: command buffer 1 failed with status 5"),
    ("sglang", Class.BUDGET, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.3"),
    ("sglang", Class.RUNTIME, "RuntimeError: Prefill out of memory. Try to lower your batch size."),
    ("sglang", Class.RUNTIME, "RuntimeError: Decode out of memory. Try to lower your batch size."),
    ("sglang", Class.RUNTIME, "Out of memory even after retracting all other requests in the decode batch."),
    ("sglang", Class.RUNTIME, "RuntimeError: alloc_req_slots runs out of memory."),
    ("sglang", Class.LOAD, "Exception: Capture cuda graph failed: CUDA"),
    ("sglang", Class.WAKE, "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)"),
    ("sglang", Class.WRAPPER, "Scheduler hit an exception: Traceback (most recent call last):"),
    ("sglang", Class.WRAPPER, "SIGQUIT received. signum=3, it usually means one child failed."),
    ("tei", Class.LOAD, 'Error: Could not start Candle backend: DriverError(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")'),
    ("tei", Class.RUNTIME, 'inference failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")'),
    ("tei", Class.WRAPPER, "Error: Could not start backend: no such model"),
    ("tei", Class.HARMLESS, '{"error":"Model is overloaded","error_type":"Overloaded"}'),
    ("ollama", Class.HOST, "model requires more system memory (8.0 GiB) than is available (4.0 GiB)"),
    ("ollama", Class.WRAPPER, "llama runner process has terminated: exit status 2"),
    ("ollama", Class.HARMLESS, "server busy, please try again. maximum pending requests exceeded"),
    ("host", Class.HOST, "kernel: oom-kill:constraint=CONSTRAINT_NONE"),
    ("host", Class.HOST, "Out of memory: Killed process 4711 (llama-server)"),
    ("host", Class.HOST, "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("host", Class.HOST, "ggml_aligned_malloc: insufficient memory (attempted to allocate 9000.00 MB)"),
    ("host", Class.HOST, "run.sh: line 3: 4711 Killed                  llama-server"),
    ("host", Class.HOST, "MemoryError"),
    ("host", Class.HOST, "OSError: [Errno 12] Cannot allocate memory"),
    ("any", Class.PORT, "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"),
    ("any", Class.CONFIG, "sh: 1: llama-serv: command not found"),
    ("any", Class.CONFIG, "llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object file"),
    ("any", Class.CONFIG, "ModuleNotFoundError: No module named 'vllm'"),
)


@pytest.mark.parametrize(("engine", "kind", "line"), FIXTURES, ids=[line[:50] for _, _, line in FIXTURES])
def test_a_line_is_classed(engine: str, kind: Class, line: str) -> None:
    """The row it hits is the one of its engine (or one shared by engines), and the class is right."""
    row = classify(line)

    assert row is not None
    assert (row.kind, row.engine) == (kind, engine)


def test_every_row_of_the_table_has_a_line() -> None:
    """A pattern nobody has an example of is a guess."""
    import re

    bare = [row for row in ROWS if not any(re.search(row.pattern, line, row.flags) for _, _, line in FIXTURES)]

    assert bare == []


@pytest.mark.parametrize(
    ("lines", "out"),
    [
        (
            [
                '{"error":{"message":"Call to wake_up method failed: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",'
                '"type":"InternalServerError","code":500}}'
            ],
            True,
        ),
        (["resuming", "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h line=28"], True),
        (["\x1b[31mERROR\x1b[0m EngineCore failed", TORCH_OOM], True),
        (
            ["CUDA Error: out of memory at csrc/cumem_allocator.cpp:62", "CUDA Error: invalid argument at csrc/cumem_allocator.cpp:169"],
            True,
        ),
        (["ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9.00 MiB on device 0: cudaMalloc failed: out of memory"], True),
        (["CUDA Error: invalid argument at csrc/cumem_allocator.cpp:169"], False),
        (["cudaHostAlloc failed: out of memory"], False),
        (["W llama_params_fit: failed to fit params to free device memory"], False),
        (["AssertionError: Memory usage increased after sleeping."], False),
        ([], False),
    ],
)
def test_a_wake_that_ran_out_of_device_memory_is_told_from_other_failures(lines: list[str], out: bool) -> None:
    """From the answer and the log: more room on the device helps only there."""
    assert ran_out(lines) is out


def test_an_engine_that_died_of_its_wake_died_of_memory() -> None:
    """The driver's words win over the wrappers behind them."""
    for line in ("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62", "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)"):
        end = ending(-3, [line, "Scheduler hit an exception: Traceback", "EngineDeadError"])

        assert end.cause is Cause.OOM
        assert "while waking" in end.summary


def test_an_ordinary_line_says_nothing() -> None:
    """Most lines are not about endings."""
    assert classify('INFO: 127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK') is None


def test_a_start_up_refusal_carries_both_numbers() -> None:
    """Wanted rounded up, free rounded down (B27)."""
    end = ending(1, ["loading", VLLM_REFUSAL, "RuntimeError: Engine core initialization failed. See root cause above."])

    assert end.cause is Cause.STARTUP_MEMORY
    assert (end.wanted_mib, end.free_mib) == (20_327, 20_244)
    assert end.summary.startswith("refused to start because its share of the device was not free (20,327 MiB wanted, 20,244 MiB free)")


def test_the_root_line_wins_over_the_wrappers_behind_it() -> None:
    """The last line only says that something failed."""
    end = ending(1, [TORCH_OOM, "ERROR EngineCore failed to start.", "RuntimeError: Engine core initialization failed."])

    assert end.cause is Cause.OOM
    assert "Tried to allocate 2.50 GiB" in end.summary
    assert "an allocation of 2,560 MiB failed" in end.summary


def test_a_share_that_is_too_small_is_not_retried() -> None:
    """More room does not help; the sentence says what does."""
    end = ending(1, ["ValueError: No available memory for the cache blocks. Try increasing", "Engine core initialization failed"])

    assert end.cause is Cause.MISCONFIGURED
    assert "raise the share or lower the context" in end.summary


def test_a_failed_buffer_is_out_of_memory_with_its_size() -> None:
    """The buffer type differs by machine, the words do not."""
    end = ending(
        1,
        ["E ggml_backend_amx_buffer_type_alloc_buffer: failed to allocate buffer of size 1442840576", "exiting due to model loading error"],
    )

    assert end.cause is Cause.OOM
    assert "1,376 MiB" in end.summary
    assert end.wanted_mib is None  # of one buffer, not of the engine


def test_a_warning_that_looks_like_the_end_is_not_taken_for_it() -> None:
    """llama.cpp warns before it tries; the reason is elsewhere."""
    end = ending(1, ["failed to fit params to free device memory", "error: invalid argument: --bogus"])

    assert end.cause is Cause.MISCONFIGURED
    assert "--bogus" in end.summary


def test_an_illegal_access_is_a_crash_not_an_out_of_memory() -> None:
    """Its footprint must not be raised for it."""
    assert ending(-6, ["CUDA error: an illegal memory access was encountered"]).cause is Cause.EXITED


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (-9, Cause.EXITED, "out-of-memory killer"),
        (137, Cause.EXITED, "out-of-memory killer"),
        (-11, Cause.EXITED, "signal 11 (SIGSEGV)"),
        (134, Cause.EXITED, "signal 6 (SIGABRT)"),
        (127, Cause.MISCONFIGURED, "not found"),
        (126, Cause.MISCONFIGURED, "cannot be executed"),
        (0, Cause.EXITED, "must stay in the foreground"),
        (3, Cause.EXITED, "exit code 3: the last words"),
        (None, Cause.EXITED, "exit code unknown"),
    ],
)
def test_without_a_telling_line_the_code_speaks(code: int | None, cause: Cause, words: str) -> None:
    """With the last words of the log beside it."""
    end = ending(code, ["first", "\x1b[31mthe last words\x1b[0m", ""])

    assert end.cause is cause
    assert words in end.summary


def test_an_empty_log_is_no_error() -> None:
    """An engine may die without a word."""
    assert ending(1, []).summary == "ended by itself, exit code 1, without a word in its log"


def test_an_endless_line_is_cut() -> None:
    """The sentence stays one that fits in an error."""
    assert len(ending(1, ["CUDA out of memory. Tried to allocate " + "x" * 10_000]).summary) < 600
