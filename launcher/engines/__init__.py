"""What an instance runs: argv, environment, and what the engine's words mean. Starts nothing.

    [engine] --probe_stack--> Stack ---+
    numactl  --probe_binding-> Binding +--make_engine--> Engine --launch(slot)--> Launch (--containers--> Launch)

Effects live in probe_stack, numactl, select and the two programs (tiny_model, vllm_cpu_wheel);
the rest is pure. Nothing here imports torch or vllm.
"""
