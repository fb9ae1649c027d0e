"""Wrong calls from Python, and what the sentence about each has to name.

In a call `lm`, `dense`, `learned` and `vit` are runs, `to` is a folder that does not exist, and
`tf` is the package. `test_python_calls.py` tries values of other types on every argument.
"""

GENERATE = {
  "lm.generate(stop='self.')": "generate: stop is 'self.'; it must be a list",
  "lm.generate(stop=['a', ''])": "generate: stop[1] is ''; it must not be empty",
  'lm.generate(3)': 'generate: prompt is 3; it must be a valid string or be a list',
  'lm.generate(np.arange(3))': 'generate: prompt[0] is 0; it must be a valid string',
  "lm.generate('a', length=10**20)": 'length is 100000000000000000000; it must be less than',
  "lm.generate('a', length=np.array([3]))": 'generate: length is an array of int64 [1]',
  "lm.generate('a', temperature=10**400)": 'generate: temperature is 1000',
  "learned.generate('a', max_length=10**6)": 'but this model has learned positions for',
  "lm.generate('abc', max_length=4)": 'max_length is 4, and a prompt is 4 tokens',
  "learned.generate('a', clip_positions=8)": 'no layer of this model has full attention',
  "learned.generate('a', length=32)": 'the prompt and the text to write are',
  "lm.generate('a', lenght=3)": "unexpected keyword argument 'lenght'",
  "vit.generate('a')": 'is not a language model',
}

LOGITS = {
  'lm.logits([])': 'inputs is []: there are no inputs',
  'lm.logits([[1, 256]])': 'inputs are ids from 1 to 256; they must be integers [B, T] from 0',
  'lm.logits([1, 2])': 'inputs are int64 [2]; they must be',
  'lm.logits([[1.0, 2.0]])': 'inputs are float64 [1, 2]; they must be',
  'lm.logits([[1, 2], [3]])': 'inputs is [[1, 2], [3]], which is no array; they must be',
  "lm.logits(['a', 3])": 'inputs are ',
  'lm.logits(np.zeros((2, 0), np.int32))': 'inputs are int32 [2, 0]; they must be',
  "learned.logits(['a' * 32])": '32 tokens',
  'vit.logits(np.zeros((1, 4, 4, 1), np.uint8))': 'are uint8 [1, 4, 4, 1]; they must be images',
  'vit.logits(np.zeros((1, 8, 8, 1), np.float32))': 'inputs are float32 [1, 8, 8, 1]; they must be',
  'vit.logits(np.zeros((1, 8, 8, 1), np.uint8), clip_positions=3)': 'clip',
}

EVALUATE = {
  'lm.evaluate([])': 'evaluate: texts is []; it must not be empty',
  "lm.evaluate('files:/nothing/*')": 'texts is files:/nothing/*',
  "learned.evaluate(['a'], max_length=33)": 'max_length is 33, but this model has learned',
  "lm.evaluate(['a'], num_fewshot=2)": 'num_fewshot has an effect only with tasks; leave it out',
  "lm.evaluate(tasks=['a'], stride=2)": 'stride has an effect only with texts; leave it out',
  'lm.evaluate(max_length=8)': 'max_length has an effect only with texts, chats or tasks; leave',
  "vit.evaluate(['a'])": 'is not a language model',
}

INSPECT = {
  'lm.held_out(10**7)': 'held_out: count is 10000000',
  'lm.held_out()': "missing 1 required positional argument: 'count'",
  'vit.held_out(10**6)': 'held_out: count is 1000000',
  "vit.maps('a')": 'is not a language model',
  "learned.maps('a' * 100)": 'but this model has learned positions for',
  "lm.maps('a', [2])": 'layers names 2; the model has the layers 0 to 1',
  "lm.plot_maps('a', [5])": 'layers names 5',
  "vit.labels('a')": 'is not a language model',
  "lm.plot(x='step')": "plot: x is 'step'; it must be 'steps', ",
  'lm.plot(beside=[3])': 'plot: beside[0] is 3; it must be an instance of Run or be a path',
  'lm.report(beside=lm)': 'report: beside is <Run',
  "lm.report(beside=['none'])": 'none is not a run',
  "lm.report(models=0).write('none/x.html')": 'write: path=none/x.html cannot be written (No such',
  "lm.report(models=0).write('x.pdf')": 'write: path=x.pdf must end in .html or .htm',
  'lm.classes': 'has no classes',
  'vit.tokenizer': 'is not a language model',
}

RUNS = {
  r"tf.load('a\0b')": r"load: source is 'a\x00b'; it must not have a null character",
  'tf.load(lm.directory / "config.json")': 'config.json',
  "tf.bring('none', 'gs://b/x', dtype='int8')": "bring: dtype is 'int8'; it must be 'float32'",
  "lm.to_hf('gs://b/x')": 'gs://b/x is not a path in a file system',
  'lm.to_hf(lm.directory)': 'exists',
  'vit.to_hf(to)': 'language model',
  "tf.train({'model': {}}, to)": "train: config is {'model': {}}",
  "tf.train('lm_plie', to)": 'there is no file lm_plie',
  "tf.train('lm_stdlib', to, steps=3)": "config key 'steps' is unknown",
  "tf.train('lm_stdlib', to, train=3)": 'config.train is 3; it must be a section of keys',
  "tf.train('lm_stdlib', to, train={'steps': np.float32(2)})": 'config.train.steps is',
  "tf.train('lm_stdlib', to, train={'stps': 2})": "did you mean 'train.steps'",
  "tf.train('lm_stdlib', to, train={3: 4})": "config key 'train.3' is unknown",
  "lm.train(30, train=[('steps', 3)])": "is [('steps', 3)]; it must be a section of keys",
  'lm.train(30, optimizer={})': "config key 'optimizer' is unknown",
  "tf.plan(3, 'v5e:4x4')": 'config is 3; it must be a config',
  "tf.plan('none', 'v5e:4x4')": 'there is no file none',
}

GROW = {
  'lm.grow(to)': 'nothing would grow',
  'lm.grow(to, 96)': 'grow: param_tokens is 96; it must be a valid dictionary',
  "lm.grow(to, {'fnn': 96})": "param_tokens names 'fnn'; did you mean",
  'lm.grow(to, {3: 96})': 'grow: param_tokens names 3; a name must be a text',
  "lm.grow(to, {'ffn': '96'})": "grow: param_tokens has ffn='96'; it must be a valid integer",
  "lm.grow(to, experts={'layr': 4})": "experts names the layer 'layr'; did you mean 'layer'",
  'lm.grow(to, top_k=2)': 'top_k',
  'lm.grow(to, expert_tokens=2)': 'expert_tokens',
  "dense.grow(to, {'ffn': 96}, method='zero_keys')": 'and this model has none; choose group',
  'dense.grow(to, width=33)': 'or net2net',
  "dense.grow(to, width=33, method='net2net')": 'width',
}

GROUPS = {
  'lm.extract(to, [1, 1])': 'groups names group 1 twice; name every group once',
  'lm.merge(vit, to)': "model.kind is 'lm' in the source and 'vit' in the added one",
  'lm.remove(to, [])': 'groups is empty; name groups by their numbers',
  'lm.remove(to, [1], experts=[1])': 'groups and experts both say what to take out',
  'lm.remove(to, experts=[])': 'experts is empty; name experts by their numbers',
  'lm.slice(to, 1)': 'one group; there is nothing to remove',
  "lm.shrink(to, {'ffn': 8}, experts=2)": 'either param_tokens or experts',
  'lm.shrink(to, experts=2)': 'experts',
}

CALLS = {**GENERATE, **LOGITS, **EVALUATE, **INSPECT, **RUNS, **GROW, **GROUPS}
