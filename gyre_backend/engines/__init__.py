"""What generates: the embedded engine (transformers, SGLang's HTTP contract) and the control of SGLang servers."""
