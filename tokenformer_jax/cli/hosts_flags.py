"""The flags of a command that can run on several hosts: see `parallel.hosts`."""

from absl import flags


def define() -> None:
  """Define the flags of a command that can run on several hosts."""
  flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of process 0, if JAX does not find the processes by itself.'
  )
  flags.DEFINE_integer('num_processes', None, 'The number of processes.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'The number of this process, from 0.', lower_bound=0)
  flags.DEFINE_integer(
    'start_timeout', 300, 'Seconds to wait for the other processes at the start.', lower_bound=1
  )
  flags.DEFINE_integer(
    'heartbeat_timeout', 100, 'Seconds of silence until a process counts as lost.', lower_bound=1
  )
