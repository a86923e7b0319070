"""What scripts/bench-proxy, scripts/bench-balance and scripts/sim-balance run.

Measured side by side (bench-proxy): `proxies`, `soak` the commands; `rivals` how each proxy is installed and
started, `plain_aiohttp`, `bare` and `ours` three of them; `stub_engine` engines that cost little, `load` clients
that cost little; `processes` one measured process: pinned, its CPU time and memory; `points` one measurement;
`figures` medians, spreads and ratios; `pages`, `svg` tables and pictures.

Balancing, live (bench-balance): `balance` the command; `model_engine` engines that take a real one's time,
`arrivals` open-loop clients; `balance_pages` tables. Both kinds of engine speak through `wire`.

Balancing, in model time (sim-balance): `engine_model`, `workloads`, `balancers`, `sim`, `fleet_model`.
"""
