"""Megatron: models of megatron-core, whose layers, stages, sequences and experts are shared out over the ranks.

Files and what they know:

    megatron_plugin     the options: MegatronLMPlugin
    megatron_models, …  architectures: what a rank's chunk of a GPT, BERT or T5 is made of
    megatron_model      MegatronModel: what a user's module holds (`chunks`, `config`, `architecture`)
    megatron_engine     Engine: one model on this rank: its chunks in Megatron's DDP, its schedule, its optimizer
    megatron_optimizer  from torch's optimizer to Megatron's; what the script holds of it
    megatron_state      weights and optimizer states in our checkpoints
    megatron_loop       Accelerate's MegatronEngine, its train steps and stand-ins

For the state: `strategy.engine_of(model)` is the Engine of a prepared model (a TrainModule, a MegatronModel or a
MegatronEngine), else None. It has `model` (the MegatronModel), `model.chunks` (plain chunks: `sharded_state_dict`),
`chunks` (the same in DDP), `config` (TransformerConfig), `optimizer` (what get_megatron_optimizer gave, else None) and
`given` (the user's torch optimizer, whose groups have the live options). `strategy.pipeline_world` are the stages.
"""
