"""config.json and generation_config.json say what `transformers` reads, in its words alone."""

import json

import hub_folders
import pytest

from tokenformer_jax.convert import export, families, hub, hub_generation
from tokenformer_jax.convert.to_run import to_jax

pytestmark = pytest.mark.slow
# Keys that are no field of the family's class: those of older versions, and those that models take
# from a config that has them; the files of Phi-3 have `attention_bias`.
OTHERS = {
  *('rope_theta', 'rope_scaling', 'rotary_pct', 'rotary_emb_base', 'partial_rotary_factor'),
  'rope_local_base_freq',
  *('head_dim', 'attention_bias'),
}
FOR_VLLM = {'hidden_act', 'hidden_activation'}  # Its Gemma 2 reads both.


@pytest.fixture(scope='module')
def transformers():
  return pytest.importorskip('transformers')


@pytest.mark.parametrize('kind', families.FAMILIES)
def test_a_config_has_the_fields_of_its_class_and_comes_back_equal(kind, transformers, tmp_path):
  model = hub_folders.model(kind)
  family, values = families.match(model)
  known = transformers.AutoConfig.for_model(family.kind)
  unknown = {*values} - {*known.to_dict(), *known.attribute_map, *OTHERS, *FOR_VLLM}
  assert not unknown, f'{family.architecture} has no such keys'
  folders = [tmp_path / 'ours', tmp_path / 'theirs']
  folders[0].mkdir()
  (folders[0] / 'config.json').write_text(json.dumps(values))
  loaded = transformers.AutoConfig.from_pretrained(folders[0])
  read = {key: getattr(loaded, key) for key in values if key not in OTHERS}
  rope = read.pop('rope_parameters', {})
  assert read == {key: values[key] for key in read}, 'a value is read as another one'
  assert rope.items() >= values.get('rope_parameters', {}).items()
  loaded.save_pretrained(folders[1])
  again = transformers.AutoConfig.from_pretrained(folders[1])
  assert again.to_diff_dict() == loaded.to_diff_dict()
  assert [hub.find_model(folder)[1] for folder in folders] == [model, model]


def test_the_files_of_a_run_say_what_it_knows(transformers, tmp_path):
  source = hub_folders.write(tmp_path / 'source', pad_token_id=3)
  (source / 'generation_config.json').write_text(json.dumps({'eos_token_id': [0, 7]}))
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'out', dtype='bfloat16')
  config = transformers.AutoConfig.from_pretrained(tmp_path / 'out')
  assert str(config.dtype).endswith('bfloat16')
  assert config.max_position_embeddings == 32 and config.rope_parameters['rope_type'] == 'llama3'
  values = json.loads((tmp_path / 'out/generation_config.json').read_text())
  assert {*values} <= {*transformers.GenerationConfig().to_dict()}
  draws = transformers.GenerationConfig.from_pretrained(tmp_path / 'out')
  assert draws.eos_token_id == [0, 7] == [*hub_generation.find(tmp_path / 'out', 64).ends]
  draws.save_pretrained(tmp_path / 'again')
  again = transformers.GenerationConfig.from_pretrained(tmp_path / 'again')
  assert again.to_dict() == draws.to_dict()
