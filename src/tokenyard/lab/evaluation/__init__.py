"""What a wiring costs in accuracy: the same questions, answered by the whole model and by its shards.

- `questions`: prompts and what must be answered: the held-out word problems, or a file of the user's own;
- `models`: a checkpoint and its tokenizer;
- `decoding`: greedy answers to many prompts at once;
- `ranks`: where answers are made: processes or threads of this machine, or the ranks of `torchrun`;
- `cells`: one exchange × wire × weights, measured; `table`: all of them, beside the whole model;
- `intervals`: how far a share of right answers can be trusted.
"""
