// Every op of the StableHLO specification with static shapes, and some of chlo, sdy and mhlo.
module @all_ops attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4, "y"=2]>
  func.func public @main(%x: tensor<4x8xf32> {tf.aliasing_output = 0 : i32}, %i: tensor<4x8xi32>, %p: tensor<4x8xi1>, %z: tensor<4x8xcomplex<f32>>, %s: tensor<f32>, %n: tensor<i32>, %tok: !stablehlo.token) -> tensor<4x8xf32> {
    %abs = stablehlo.abs %x : tensor<4x8xf32>
    %add = stablehlo.add %abs, %x : tensor<4x8xf32>
    %after = stablehlo.after_all %tok, %tok : !stablehlo.token
    %and = stablehlo.and %p, %p : tensor<4x8xi1>
    %atan2 = stablehlo.atan2 %x, %x : tensor<4x8xf32>
    %bc = stablehlo.bitcast_convert %x : (tensor<4x8xf32>) -> tensor<4x8xi32>
    %bcast = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %bcast0 = "stablehlo.broadcast"(%x) <{broadcast_sizes = array<i64: 2>}> : (tensor<4x8xf32>) -> tensor<2x4x8xf32>
    %cbrt = stablehlo.cbrt %x : tensor<4x8xf32>
    %ceil = stablehlo.ceil %x : tensor<4x8xf32>
    %clamp = stablehlo.clamp %s, %x, %s : (tensor<f32>, tensor<4x8xf32>, tensor<f32>) -> tensor<4x8xf32>
    %clz = stablehlo.count_leading_zeros %i : tensor<4x8xi32>
    %cmp = stablehlo.compare LT, %x, %x, TOTALORDER : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xi1>
    %cplx = stablehlo.complex %x, %x : tensor<4x8xcomplex<f32>>
    %cat = stablehlo.concatenate %x, %x, dim = 1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x16xf32>
    %const = stablehlo.constant dense<[0xFF800000, 1.5]> : tensor<2xf32>
    %zc = stablehlo.constant dense<[(1.0, 2.0), (3.0, 4.0)]> : tensor<2xcomplex<f32>>
    %conv = stablehlo.convert %x : (tensor<4x8xf32>) -> tensor<4x8xbf16>
    %cos = stablehlo.cosine %x : tensor<4x8xf32>
    %div = stablehlo.divide %x, %x : tensor<4x8xf32>
    %tr = stablehlo.transpose %x, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>
    %dot = stablehlo.dot_general %x, %tr, contracting_dims = [1] x [0], precision = [HIGHEST, DEFAULT] : (tensor<4x8xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %dot2 = stablehlo.dot %x, %tr : (tensor<4x8xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %bdot = stablehlo.dot_general %bcast0, %bcast0, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x4x8xf32>, tensor<2x4x8xf32>) -> tensor<2x4x4xf32>
    %ds = stablehlo.dynamic_slice %x, %n, %n, sizes = [2, 3] : (tensor<4x8xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
    %dus = stablehlo.dynamic_update_slice %x, %ds, %n, %n : (tensor<4x8xf32>, tensor<2x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x8xf32>
    %exp = stablehlo.exponential %x : tensor<4x8xf32>
    %expm1 = stablehlo.exponential_minus_one %x : tensor<4x8xf32>
    %fft = stablehlo.fft %z, type = FFT, length = [8] : (tensor<4x8xcomplex<f32>>) -> tensor<4x8xcomplex<f32>>
    %floor = stablehlo.floor %x : tensor<4x8xf32>
    %gsize = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4x8xf32>) -> tensor<i32>
    %tup = stablehlo.tuple %x, %n : tuple<tensor<4x8xf32>, tensor<i32>>
    %gte = stablehlo.get_tuple_element %tup[1] : (tuple<tensor<4x8xf32>, tensor<i32>>) -> tensor<i32>
    %imag = stablehlo.imag %z : (tensor<4x8xcomplex<f32>>) -> tensor<4x8xf32>
    %real = stablehlo.real %z : (tensor<4x8xcomplex<f32>>) -> tensor<4x8xf32>
    %iota = stablehlo.iota dim = 1 : tensor<4x8xi32>
    %fin = stablehlo.is_finite %x : (tensor<4x8xf32>) -> tensor<4x8xi1>
    %log = stablehlo.log %x : tensor<4x8xf32>
    %log1p = stablehlo.log_plus_one %x : tensor<4x8xf32>
    %logistic = stablehlo.logistic %x : tensor<4x8xf32>
    %max = stablehlo.maximum %x, %x : tensor<4x8xf32>
    %min = stablehlo.minimum %x, %x : tensor<4x8xf32>
    %mul = stablehlo.multiply %x, %x : tensor<4x8xf32>
    %neg = stablehlo.negate %x : tensor<4x8xf32>
    %not = stablehlo.not %p : tensor<4x8xi1>
    %or = stablehlo.or %p, %p : tensor<4x8xi1>
    %ob:2 = stablehlo.optimization_barrier %x, %i : tensor<4x8xf32>, tensor<4x8xi32>
    %pad = stablehlo.pad %x, %s, low = [1, 0], high = [2, 3], interior = [0, 1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<7x18xf32>
    %pid = stablehlo.partition_id : tensor<ui32>
    %rid = stablehlo.replica_id : tensor<ui32>
    %popcnt = stablehlo.popcnt %i : tensor<4x8xi32>
    %pow = stablehlo.power %x, %x : tensor<4x8xf32>
    %rp = stablehlo.reduce_precision %x, format = e5m10 : tensor<4x8xf32>
    %rem = stablehlo.remainder %x, %x : tensor<4x8xf32>
    %resh = stablehlo.reshape %x : (tensor<4x8xf32>) -> tensor<32xf32>
    %rev = stablehlo.reverse %x, dims = [1] : tensor<4x8xf32>
    %rafz = stablehlo.round_nearest_afz %x : tensor<4x8xf32>
    %reven = stablehlo.round_nearest_even %x : tensor<4x8xf32>
    %rsqrt = stablehlo.rsqrt %x : tensor<4x8xf32>
    %sel = stablehlo.select %p, %x, %x : tensor<4x8xi1>, tensor<4x8xf32>
    %shl = stablehlo.shift_left %i, %i : tensor<4x8xi32>
    %sra = stablehlo.shift_right_arithmetic %i, %i : tensor<4x8xi32>
    %srl = stablehlo.shift_right_logical %i, %i : tensor<4x8xi32>
    %sign = stablehlo.sign %x : tensor<4x8xf32>
    %sine = stablehlo.sine %x : tensor<4x8xf32>
    %slice = stablehlo.slice %x [0:4, 1:8:2] : (tensor<4x8xf32>) -> tensor<4x4xf32>
    %sqrt = stablehlo.sqrt %x : tensor<4x8xf32>
    %sub = stablehlo.subtract %x, %x : tensor<4x8xf32>
    %tan = stablehlo.tan %x : tensor<4x8xf32>
    %tanh = stablehlo.tanh %x : tensor<4x8xf32>
    %xor = stablehlo.xor %p, %p : tensor<4x8xi1>
    %chol = stablehlo.cholesky %dot, lower = true : tensor<4x4xf32>
    %tri = "stablehlo.triangular_solve"(%dot, %dot) <{left_side = true, lower = true, transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}> : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
    %scale = stablehlo.constant dense<1.0> : tensor<8xf32>
    %bnt:3 = "stablehlo.batch_norm_training"(%x, %scale, %scale) <{epsilon = 1.0e-3 : f32, feature_index = 1 : i64}> : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>) -> (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
    %bni = "stablehlo.batch_norm_inference"(%x, %scale, %scale, %scale, %scale) <{epsilon = 1.0e-3 : f32, feature_index = 1 : i64}> : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
    %bng:3 = "stablehlo.batch_norm_grad"(%x, %scale, %scale, %scale, %x) <{epsilon = 1.0e-3 : f32, feature_index = 1 : i64}> : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
    %img = stablehlo.constant dense<1.0> : tensor<2x16x3xf32>
    %ker = stablehlo.constant dense<1.0> : tensor<5x3x6xf32>
    %conv1d = stablehlo.convolution(%img, %ker) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {stride = [2], pad = [[2, 1]], lhs_dilate = [1], rhs_dilate = [1], reverse = [false]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<2x16x3xf32>, tensor<5x3x6xf32>) -> tensor<2x8x6xf32>
    %red = stablehlo.reduce(%x init: %s) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
    %rw = "stablehlo.reduce_window"(%x, %s) <{window_dimensions = array<i64: 1, 3>, window_strides = array<i64: 1, 2>, padding = dense<[[0, 0], [1, 1]]> : tensor<2x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>, tensor<f32>) -> tensor<4x4xf32>
    %sas = "stablehlo.select_and_scatter"(%x, %rw, %s) <{window_dimensions = array<i64: 1, 3>, window_strides = array<i64: 1, 2>, padding = dense<[[0, 0], [1, 1]]> : tensor<2x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %m : tensor<i1>
    }, {
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>, tensor<4x4xf32>, tensor<f32>) -> tensor<4x8xf32>
    %map = "stablehlo.map"(%x, %x) <{dimensions = array<i64: 0, 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.multiply %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
    %sort:2 = "stablehlo.sort"(%x, %i) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
      %m = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %m : tensor<i1>
    }) : (tensor<4x8xf32>, tensor<4x8xi32>) -> (tensor<4x8xf32>, tensor<4x8xi32>)
    %idx = stablehlo.constant dense<[[0], [1], [3]]> : tensor<3x1xi32>
    %gather = "stablehlo.gather"(%x, %idx) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = true, slice_sizes = array<i64: 1, 8>}> : (tensor<4x8xf32>, tensor<3x1xi32>) -> tensor<3x8xf32>
    %scatter = "stablehlo.scatter"(%x, %idx, %gather) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, indices_are_sorted = false, unique_indices = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>, tensor<3x1xi32>, tensor<3x8xf32>) -> tensor<4x8xf32>
    %shape = stablehlo.constant dense<[4, 8]> : tensor<2xi64>
    %rng = stablehlo.rng %s, %s, %shape, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<4x8xf32>
    %key = stablehlo.constant dense<[1, 2]> : tensor<2xui64>
    %bits:2 = stablehlo.rng_bit_generator %key, algorithm = THREE_FRY : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x8xui32>)
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %pred = stablehlo.constant dense<true> : tensor<i1>
    %while:2 = stablehlo.while(%k = %zero, %v = %x) : tensor<i32>, tensor<4x8xf32>
    cond {
      %limit = stablehlo.constant dense<5> : tensor<i32>
      %m = stablehlo.compare LT, %k, %limit : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %m : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %m = stablehlo.add %k, %one : tensor<i32>
      %w = stablehlo.add %v, %abs : tensor<4x8xf32>
      stablehlo.return %m, %w : tensor<i32>, tensor<4x8xf32>
    }
    %case = "stablehlo.case"(%n) ({
      stablehlo.return %x : tensor<4x8xf32>
    }, {
      %m = stablehlo.negate %abs : tensor<4x8xf32>
      stablehlo.return %m : tensor<4x8xf32>
    }) : (tensor<i32>) -> tensor<4x8xf32>
    %if = "stablehlo.if"(%pred) ({
      %m = stablehlo.negate %x : tensor<4x8xf32>
      stablehlo.return %m : tensor<4x8xf32>
    }, {
      stablehlo.return %abs : tensor<4x8xf32>
    }) : (tensor<i1>) -> tensor<4x8xf32>
    %cc = stablehlo.custom_call @unheard_of(%x) {api_version = 2 : i32, backend_config = "opaque } > \22 text"} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %cc2:2 = stablehlo.custom_call @typed(%x) {api_version = 4 : i32, backend_config = {alpha = 2 : i64, mode = "fast"}} : (tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<8xui8>)
    %comp = stablehlo.composite "lib.gelu" %x {decomposition = @gelu} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %ar = "stablehlo.all_reduce"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 0>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %ag = "stablehlo.all_gather"(%x) <{all_gather_dim = 1 : i64, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "y">]>}> : (tensor<4x8xf32>) -> tensor<4x16xf32>
    %rs = "stablehlo.reduce_scatter"(%x) <{scatter_dimension = 1 : i64, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32>
    }) : (tensor<4x8xf32>) -> tensor<4x4xf32>
    %a2a = "stablehlo.all_to_all"(%x) <{split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>}> : (tensor<4x8xf32>) -> tensor<8x4xf32>
    %cp = "stablehlo.collective_permute"(%x) <{source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %cb = "stablehlo.collective_broadcast"(%x) <{replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>}> : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %send = "stablehlo.send"(%x, %tok) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 2>, is_host_transfer = true}> : (tensor<4x8xf32>, !stablehlo.token) -> !stablehlo.token
    %recv:2 = "stablehlo.recv"(%send) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 3>, is_host_transfer = true}> : (!stablehlo.token) -> (tensor<4x8xf32>, !stablehlo.token)
    %in:2 = "stablehlo.infeed"(%recv#1) <{infeed_config = "", layout = [[0, 1]]}> : (!stablehlo.token) -> (tensor<4x8xf32>, !stablehlo.token)
    %out = "stablehlo.outfeed"(%in#0, %in#1) <{outfeed_config = ""}> : (tensor<4x8xf32>, !stablehlo.token) -> !stablehlo.token
    %ct = stablehlo.create_token : !stablehlo.token
    %i4 = stablehlo.convert %i : (tensor<4x8xi32>) -> tensor<4x8xi4>
    %f8 = stablehlo.convert %x : (tensor<4x8xf32>) -> tensor<4x8xf8E4M3FN>
    %erfc = chlo.erfc %x : tensor<4x8xf32> -> tensor<4x8xf32>
    %topk:2 = chlo.top_k(%x, k = 2) : tensor<4x8xf32> -> (tensor<4x2xf32>, tensor<4x2xi32>)
    %erf = "mhlo.erf"(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %shard = sdy.sharding_constraint %x <@mesh, [{"x"}, {"y"}]> : tensor<4x8xf32>
    %foreign = "foreign.op"(%x) {note = "kept"} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %add : tensor<4x8xf32>
  }
  func.func private @gelu(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
    %0 = stablehlo.tanh %x : tensor<4x8xf32>
    return %0 : tensor<4x8xf32>
  }
}
