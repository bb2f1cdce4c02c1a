"""How much accuracy a wiring costs: the same questions, answered by the whole model and by the sharded one.

- `questions`: prompts and their right answers: the held-out word problems, or a file of the user's;
- `models`: a checkpoint and its tokenizer;
- `decoding`: greedy answers to many prompts at once;
- `ranks`: where answers are made: processes or threads of this machine, or the ranks of `torchrun`;
- `cells`: one exchange × wire × weights, measured; `table`: all of them, beside the whole model;
- `intervals`: how far a share of right answers can be trusted.
"""
