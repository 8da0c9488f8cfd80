"""Words of every process: messages, errors, state tables, sampling parameters, plans of a step."""
