module {
func.func public @main(
  %a: tensor<64x64xbf16>, %i: tensor<1x8x8x64xbf16>, %k: tensor<3x3x64x64xbf16>
) -> (tensor<64xbf16>, tensor<1x8x8x64xbf16>) {
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
    : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xbf16>
  %1 = stablehlo.tanh %0 : tensor<64x64xbf16>
  %2 = stablehlo.constant dense<0.0> : tensor<bf16>
  %3 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [1]
    : (tensor<64x64xbf16>, tensor<bf16>) -> tensor<64xbf16>
  %4 = stablehlo.convolution(%i, %k)
    dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<1x8x8x64xbf16>, tensor<3x3x64x64xbf16>) -> tensor<1x8x8x64xbf16>
  return %3, %4 : tensor<64xbf16>, tensor<1x8x8x64xbf16>
}
}
