"""Write the shards of a token store by Apache Beam, on one machine or on many.

Each shard is one element of a pipeline. A worker writes it into the store with its record, by which
this process finds it when the pipeline has ended. So an element that Beam repeats does no harm.
"""

# pyright: reportMissingImports=false
# Beam is in an environment of its own.

import functools
import importlib.util
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenformer_jax.data import shards, tokenizers
from tokenformer_jax.data.shard_writer import ShardBuild, record_name
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry

if TYPE_CHECKING:
  from apache_beam.options.pipeline_options import PipelineOptions


def read_options(flags: str) -> 'PipelineOptions':
  """Return the options that Beam's flags stand for."""
  if importlib.util.find_spec('apache_beam') is None:
    raise UserError(
      '--beam needs Apache Beam; install the extra [beam] in an environment of its own, as '
      'docs/data.md says'
    )
  from apache_beam import runners  # noqa: PLC0415 (from an extra, and only needed here)
  from apache_beam.options import pipeline_options  # noqa: PLC0415

  options = pipeline_options.PipelineOptions(shlex.split(flags))
  runner = options.view_as(pipeline_options.StandardOptions).runner or 'DirectRunner'
  try:
    runners.create_runner(runner)
  except ValueError as error:
    raise UserError(f'--beam is {flags!r}: {retry.one_line(error)}') from error
  return options


def write_shards(
  builds: Sequence[ShardBuild], tokenizer: tokenizers.Tokenizer, flags: str
) -> Iterator[shards.Shard]:
  """Yield the shards of builds, in their order, when the pipeline has written all of them."""
  options = read_options(flags)
  if not builds:
    return
  import apache_beam  # noqa: PLC0415 (see above)

  content = json.dumps(tokenizer.to_json())
  try:
    with apache_beam.Pipeline(options=options) as pipeline:
      _ = pipeline | apache_beam.Create(builds) | apache_beam.Map(_write, content)
  except Exception as error:  # Runners raise exceptions of many types.
    raise UserError(
      f'the pipeline of --beam={flags!r} failed ({retry.one_line(error)}); the same command '
      'continues with the shards that are missing'
    ) from error
  sizes = shards.file_sizes(builds[0].folder)
  for build in builds:
    if (shard := build.find(sizes)) is None:
      raise UserError(_reason(build))
    yield shard


def _write(build: ShardBuild, content: str) -> None:
  """Write a shard, or record what is wrong with its text."""
  try:
    build.write(_tokenizer(content))
  except UserError as error:
    shards.put_json(build.folder, record_name(build.name), {'error': str(error)})


@functools.cache
def _tokenizer(content: str) -> tokenizers.Tokenizer:
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # Beam has a worker for each core.
  return tokenizers.from_json(json.loads(content))


def _reason(build: ShardBuild) -> str:
  record = build.folder / record_name(build.name)
  if paths.exists(record) and (error := json.loads(record.read_text('utf-8')).get('error')):
    return error
  return (
    f'no worker of Apache Beam wrote {build.folder / build.name}; --out must be a folder that all '
    'workers reach, such as one in a bucket'
  )
