"""Layer-parallel drafting (EasySpec): a draft model whose layers run in groups, a bit fuzzily."""
