"""What an instance runs: argv, environment, and what the engine's words mean. Starts nothing.

    [engine] --probe_stack--> Stack ---+
    numactl  --probe_binding-> Binding +--make_engine--> Engine --launch(slot)--> Launch (--containers--> Launch)

vllm/ knows vLLM, llama_cpp/ llama.cpp's server; make tells kinds apart; log and causes say how any engine's output is
read. Effects live in software, numactl, make, vllm/installed, vllm/needs, llama_cpp/launch and the programs (tiny_model,
build_jobs, vllm/cpu_wheel, vllm/needs_program);
the rest is pure but for small files of the model's folder. Nothing here imports torch or vllm.
"""
