"""Values and helpers that know nothing of the rest: sets of cpus, amounts, texts, errors, files, the clock, log lines."""
