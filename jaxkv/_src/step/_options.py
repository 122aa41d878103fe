"""Options of XLA for programs that take a pool."""

# In percent of the memory that is free when XLA compiles. XLA counts a donated pool up to three
# times: as an argument, as a result, and in between. It then finds that the program does not fit,
# computes small arrays anew in each layer to save memory, and warns that it "can't reduce memory
# use". With room for all three it leaves the program as it is.
COMPILER_OPTIONS = {"xla_gpu_memory_limit_slop_factor": 100_000}
