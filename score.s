	.file	"<string>"
	.section	.ltext,"axl",@progbits
	.globl	_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	pushq	%rbp
	pushq	%r15
	pushq	%r14
	pushq	%r13
	pushq	%r12
	pushq	%rbx
	subq	$120, %rsp
	movq	392(%rsp), %rdx
	movq	%rdi, -56(%rsp)
	testq	%rdx, %rdx
	jle	.LBB0_26
	movq	184(%rsp), %r15
	movl	%r15d, %eax
	movq	%r15, %rcx
	andl	$1, %eax
	shrq	%rcx
	addq	%rax, %rcx
	xorl	%eax, %eax
	testq	%r15, %r15
	cmovgq	%rcx, %rax
	movq	%rax, 32(%rsp)
	testq	%rax, %rax
	je	.LBB0_26
	movq	192(%rsp), %rax
	movq	368(%rsp), %r13
	movq	248(%rsp), %rbp
	movq	176(%rsp), %rcx
	movabsq	$9223372036854775806, %r8
	vpxor	%xmm0, %xmm0, %xmm0
	leaq	(%rax,%rax), %rsi
	leaq	(,%rax,4), %r9
	movq	%rax, %r10
	sarq	$4, %r10
	leaq	(,%rax,8), %rax
	shlq	$2, %r13
	leaq	(%rsi,%rsi,2), %rdi
	andq	%r10, %r8
	movq	%rsi, 24(%rsp)
	movq	%r10, -128(%rsp)
	movq	%r13, 96(%rsp)
	movq	%rax, -72(%rsp)
	movq	%r8, 64(%rsp)
	leaq	(%rbp,%rsi), %r8
	addq	%r9, %rcx
	movq	%r10, %rsi
	movq	%r9, -112(%rsp)
	movq	%rdi, 16(%rsp)
	leaq	(%rbp,%rdi), %rax
	leaq	(%rbp,%r9), %rdi
	movq	%rcx, 8(%rsp)
	jmp	.LBB0_4
	.p2align	4
.LBB0_3:
	movq	-48(%rsp), %rdx
	decq	%rdx
	jle	.LBB0_26
.LBB0_4:
	movq	%rdx, -48(%rsp)
	movq	%rbp, %rcx
	movq	%r8, %rdx
	movq	%rdi, %r9
	movq	%rax, %r10
	xorl	%r11d, %r11d
	xorl	%ebx, %ebx
	jmp	.LBB0_6
	.p2align	4
.LBB0_5:
	movq	-40(%rsp), %rbx
	movq	-32(%rsp), %r11
	movq	-24(%rsp), %r10
	movq	-16(%rsp), %r9
	movq	-8(%rsp), %rdx
	movq	(%rsp), %rcx
	incq	%rbx
	addq	$8192, %r11
	addq	$8192, %r10
	addq	$8192, %r9
	addq	$8192, %rdx
	addq	$8192, %rcx
	cmpq	$8, %rbx
	je	.LBB0_3
.LBB0_6:
	movq	%rbx, -40(%rsp)
	shlq	$13, %rbx
	movq	%rcx, (%rsp)
	movq	%rcx, -80(%rsp)
	movq	%rdx, -8(%rsp)
	movq	%rdx, -88(%rsp)
	movq	%r9, -16(%rsp)
	movq	%r9, -96(%rsp)
	movq	%r10, -24(%rsp)
	movq	%r10, -104(%rsp)
	movq	%r11, -32(%rsp)
	movq	%r11, -120(%rsp)
	xorl	%r10d, %r10d
	addq	%rbp, %rbx
	movq	%rbx, 40(%rsp)
	movl	$8, %ebx
	jmp	.LBB0_8
	.p2align	4
.LBB0_7:
	movq	-72(%rsp), %rcx
	movq	48(%rsp), %r10
	movq	56(%rsp), %rbx
	addq	%rcx, -120(%rsp)
	addq	%rcx, -104(%rsp)
	addq	%rcx, -96(%rsp)
	addq	%rcx, -88(%rsp)
	addq	%rcx, -80(%rsp)
	addq	$4, %r10
	subq	$1, %rbx
	jbe	.LBB0_5
.LBB0_8:
	movq	24(%rsp), %rdx
	movq	352(%rsp), %rcx
	movq	40(%rsp), %r9
	movq	%r10, %r11
	movq	%r10, 48(%rsp)
	movq	%rbx, 56(%rsp)
	movq	176(%rsp), %rbx
	movq	32(%rsp), %r14
	xorl	%r12d, %r12d
	imulq	%rdx, %r11
	leaq	(%rcx,%r10,4), %rcx
	imulq	192(%rsp), %r10
	movq	%rcx, 112(%rsp)
	addq	%r9, %r11
	leaq	(%r11,%rdx), %rcx
	movq	8(%rsp), %rdx
	movq	%r11, -64(%rsp)
	movq	%rcx, 88(%rsp)
	movq	-112(%rsp), %rcx
	addq	%r9, %r10
	movq	%r10, 104(%rsp)
	addq	%r11, %rcx
	movq	%rcx, 80(%rsp)
	movq	16(%rsp), %rcx
	addq	%r11, %rcx
	movq	%rcx, 72(%rsp)
	jmp	.LBB0_13
.LBB0_9:
	vxorps	%xmm4, %xmm4, %xmm4
	vxorps	%xmm3, %xmm3, %xmm3
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm1, %xmm1, %xmm1
.LBB0_10:
	vunpcklpd	%ymm3, %ymm4, %ymm5
	vunpckhpd	%ymm3, %ymm4, %ymm3
.LBB0_11:
	vaddps	%ymm3, %ymm5, %ymm3
	vunpcklpd	%ymm1, %ymm2, %ymm5
	vunpckhpd	%ymm1, %ymm2, %ymm1
	vaddps	%ymm1, %ymm5, %ymm1
	vhaddps	%ymm1, %ymm3, %ymm1
	vextractf128	$1, %ymm1, %xmm2
	vaddps	%xmm2, %xmm1, %xmm1
	movq	-72(%rsp), %rcx
	addq	$2, %r12
	vmovups	%xmm1, (%r11)
	addq	%rcx, %rbx
	addq	%rcx, %rdx
	cmpq	$1, %r14
	leaq	-1(%r14), %r14
	jle	.LBB0_7
.LBB0_13:
	movq	%r12, %r11
	imulq	%r13, %r11
	addq	112(%rsp), %r11
	testq	%r12, %r12
	movq	-64(%rsp), %r10
	movq	%r12, %rcx
	cmoveq	104(%rsp), %r10
	orq	$1, %rcx
	cmpq	%r15, %rcx
	jge	.LBB0_17
	testq	%rsi, %rsi
	jle	.LBB0_20
	movq	%rsi, %r13
	movq	-80(%rsp), %rsi
	movq	-88(%rsp), %r15
	movq	-96(%rsp), %rbp
	movq	-104(%rsp), %r9
	vxorps	%xmm1, %xmm1, %xmm1
	xorl	%ecx, %ecx
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm3, %xmm3, %xmm3
	vxorps	%xmm4, %xmm4, %xmm4
	vxorps	%xmm5, %xmm5, %xmm5
	vxorps	%xmm6, %xmm6, %xmm6
	vxorps	%xmm8, %xmm8, %xmm8
	vxorps	%xmm7, %xmm7, %xmm7
	.p2align	4
.LBB0_16:
	vmovdqu	(%rsi), %ymm12
	vmovdqu	(%r15), %ymm11
	vmovups	(%rbx,%rcx), %ymm14
	vmovups	(%rdx,%rcx), %ymm15
	vmovdqu	(%rbp), %ymm10
	vmovdqu	(%r9), %ymm9
	prefetcht1	(%r10,%rcx)
	prefetcht1	65536(%r10,%rcx)
	addq	$32, %r9
	addq	$32, %rbp
	addq	$32, %r15
	addq	$32, %rsi
	vpslld	$16, %ymm12, %ymm13
	vpblendw	$170, %ymm12, %ymm0, %ymm12
	vfmadd231ps	%ymm13, %ymm14, %ymm7
	vfmadd231ps	%ymm13, %ymm15, %ymm4
	vpslld	$16, %ymm11, %ymm13
	vpblendw	$170, %ymm11, %ymm0, %ymm11
	vfmadd231ps	%ymm13, %ymm14, %ymm8
	vfmadd231ps	%ymm13, %ymm15, %ymm3
	vpslld	$16, %ymm10, %ymm13
	vpblendw	$170, %ymm10, %ymm0, %ymm10
	vfmadd231ps	%ymm13, %ymm14, %ymm6
	vfmadd231ps	%ymm13, %ymm15, %ymm2
	vpslld	$16, %ymm9, %ymm13
	vpblendw	$170, %ymm9, %ymm0, %ymm9
	vfmadd231ps	%ymm14, %ymm13, %ymm5
	vmovups	32(%rdx,%rcx), %ymm14
	vfmadd231ps	%ymm13, %ymm15, %ymm1
	vmovups	32(%rbx,%rcx), %ymm15
	addq	$64, %rcx
	decq	%r13
	vfmadd231ps	%ymm12, %ymm15, %ymm7
	vfmadd231ps	%ymm12, %ymm14, %ymm4
	vfmadd231ps	%ymm11, %ymm15, %ymm8
	vfmadd231ps	%ymm11, %ymm14, %ymm3
	vfmadd231ps	%ymm10, %ymm15, %ymm6
	vfmadd231ps	%ymm10, %ymm14, %ymm2
	vfmadd231ps	%ymm15, %ymm9, %ymm5
	vfmadd231ps	%ymm9, %ymm14, %ymm1
	jne	.LBB0_16
	jmp	.LBB0_21
	.p2align	4
.LBB0_17:
	testq	%rsi, %rsi
	jle	.LBB0_9
	vxorps	%xmm1, %xmm1, %xmm1
	cmpq	$1, %rsi
	jne	.LBB0_22
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm3, %xmm3, %xmm3
	vxorps	%xmm4, %xmm4, %xmm4
	xorl	%ecx, %ecx
	jmp	.LBB0_25
.LBB0_20:
	vxorps	%xmm7, %xmm7, %xmm7
	vxorps	%xmm8, %xmm8, %xmm8
	vxorps	%xmm6, %xmm6, %xmm6
	vxorps	%xmm5, %xmm5, %xmm5
	vxorps	%xmm4, %xmm4, %xmm4
	vxorps	%xmm3, %xmm3, %xmm3
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm1, %xmm1, %xmm1
.LBB0_21:
	vunpcklpd	%ymm8, %ymm7, %ymm9
	vunpckhpd	%ymm8, %ymm7, %ymm7
	movq	96(%rsp), %r13
	movq	184(%rsp), %r15
	movq	248(%rsp), %rbp
	movq	-128(%rsp), %rsi
	vaddps	%ymm7, %ymm9, %ymm7
	vunpcklpd	%ymm5, %ymm6, %ymm9
	vunpckhpd	%ymm5, %ymm6, %ymm5
	vaddps	%ymm5, %ymm9, %ymm5
	vhaddps	%ymm5, %ymm7, %ymm5
	vextractf128	$1, %ymm5, %xmm6
	vaddps	%xmm6, %xmm5, %xmm5
	vmovups	%xmm5, (%r11)
	vunpcklpd	%ymm3, %ymm4, %ymm5
	vunpckhpd	%ymm3, %ymm4, %ymm3
	addq	%r13, %r11
	jmp	.LBB0_11
.LBB0_22:
	movq	-120(%rsp), %rsi
	movq	64(%rsp), %r15
	xorl	%r9d, %r9d
	vxorps	%xmm2, %xmm2, %xmm2
	vxorps	%xmm3, %xmm3, %xmm3
	vxorps	%xmm4, %xmm4, %xmm4
	xorl	%ecx, %ecx
	.p2align	4
.LBB0_23:
	vmovdqu	(%rbp,%rsi), %ymm5
	vmovdqu	(%r8,%rsi), %ymm6
	vmovups	(%rbx,%r9), %ymm10
	vmovdqu	(%rdi,%rsi), %ymm7
	vmovdqu	(%rax,%rsi), %ymm8
	vmovups	32(%rbx,%r9), %ymm11
	prefetcht1	(%r10,%r9)
	prefetcht1	65536(%r10,%r9)
	prefetcht1	64(%r10,%r9)
	prefetcht1	65600(%r10,%r9)
	addq	$2, %rcx
	vpslld	$16, %ymm5, %ymm9
	vfmadd213ps	%ymm4, %ymm10, %ymm9
	vpslld	$16, %ymm6, %ymm4
	vfmadd213ps	%ymm3, %ymm10, %ymm4
	vpslld	$16, %ymm7, %ymm3
	vfmadd213ps	%ymm2, %ymm10, %ymm3
	vpslld	$16, %ymm8, %ymm2
	vfmadd213ps	%ymm1, %ymm10, %ymm2
	vpblendw	$170, %ymm5, %ymm0, %ymm1
	vpblendw	$170, %ymm6, %ymm0, %ymm5
	vmovdqu	32(%r8,%rsi), %ymm6
	vmovups	64(%rbx,%r9), %ymm10
	vfmadd213ps	%ymm9, %ymm11, %ymm1
	vfmadd213ps	%ymm4, %ymm11, %ymm5
	vpblendw	$170, %ymm7, %ymm0, %ymm4
	vmovdqu	32(%rdi,%rsi), %ymm7
	vfmadd213ps	%ymm3, %ymm11, %ymm4
	vpblendw	$170, %ymm8, %ymm0, %ymm3
	vmovdqu	32(%rax,%rsi), %ymm8
	vfmadd213ps	%ymm2, %ymm11, %ymm3
	vmovdqu	32(%rbp,%rsi), %ymm2
	vmovups	96(%rbx,%r9), %ymm11
	subq	$-128, %r9
	addq	$64, %rsi
	vpslld	$16, %ymm7, %ymm13
	vpslld	$16, %ymm8, %ymm12
	vfmadd213ps	%ymm4, %ymm10, %ymm13
	vpslld	$16, %ymm2, %ymm9
	vfmadd213ps	%ymm3, %ymm10, %ymm12
	vpblendw	$170, %ymm6, %ymm0, %ymm3
	vpblendw	$170, %ymm2, %ymm0, %ymm4
	vpblendw	$170, %ymm7, %ymm0, %ymm2
	vfmadd213ps	%ymm1, %ymm10, %ymm9
	vpslld	$16, %ymm6, %ymm1
	vfmadd213ps	%ymm5, %ymm10, %ymm1
	vfmadd213ps	%ymm13, %ymm11, %ymm2
	vfmadd213ps	%ymm9, %ymm11, %ymm4
	vfmadd213ps	%ymm1, %ymm11, %ymm3
	vpblendw	$170, %ymm8, %ymm0, %ymm1
	vfmadd213ps	%ymm12, %ymm11, %ymm1
	cmpq	%rcx, %r15
	jne	.LBB0_23
	movq	-128(%rsp), %rsi
	movq	184(%rsp), %r15
	testb	$1, %sil
	je	.LBB0_10
.LBB0_25:
	movq	%rcx, %r9
	shlq	$6, %r9
	shlq	$5, %rcx
	movq	%r12, %rsi
	imulq	-112(%rsp), %rsi
	prefetcht1	(%r9,%r10)
	addq	$65536, %r10
	prefetcht1	(%r10,%r9)
	movq	-64(%rsp), %r10
	addq	176(%rsp), %rsi
	vmovdqu	(%rcx,%r10), %ymm5
	movq	88(%rsp), %r10
	vmovups	(%r9,%rsi), %ymm10
	vmovups	32(%r9,%rsi), %ymm11
	movq	-128(%rsp), %rsi
	vmovdqu	(%rcx,%r10), %ymm6
	movq	80(%rsp), %r10
	vpslld	$16, %ymm5, %ymm9
	vfmadd213ps	%ymm4, %ymm10, %ymm9
	vpblendw	$170, %ymm5, %ymm0, %ymm4
	vmovdqu	(%rcx,%r10), %ymm7
	movq	72(%rsp), %r10
	vpslld	$16, %ymm6, %ymm12
	vfmadd213ps	%ymm9, %ymm11, %ymm4
	vfmadd213ps	%ymm3, %ymm10, %ymm12
	vpblendw	$170, %ymm6, %ymm0, %ymm3
	vmovdqu	(%rcx,%r10), %ymm8
	vpslld	$16, %ymm7, %ymm13
	vfmadd213ps	%ymm12, %ymm11, %ymm3
	vfmadd213ps	%ymm2, %ymm10, %ymm13
	vpblendw	$170, %ymm7, %ymm0, %ymm2
	vpslld	$16, %ymm8, %ymm14
	vfmadd213ps	%ymm13, %ymm11, %ymm2
	vfmadd213ps	%ymm1, %ymm10, %ymm14
	vpblendw	$170, %ymm8, %ymm0, %ymm1
	vfmadd213ps	%ymm14, %ymm11, %ymm1
	jmp	.LBB0_10
.LBB0_26:
	movq	-56(%rsp), %rax
	movq	$0, (%rax)
	xorl	%eax, %eax
	addq	$120, %rsp
	popq	%rbx
	popq	%r12
	popq	%r13
	popq	%r14
	popq	%r15
	popq	%rbp
	vzeroupper
	retq
.Lfunc_end0:
	.size	_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end0-_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx

	.globl	_ZN7cpython8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN7cpython8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN7cpython8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$568, %rsp
	.cfi_def_cfa_offset 624
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	leaq	272(%rsp), %rax
	movq	%rsi, %rdi
	movabsq	$.const.score, %rsi
	movabsq	$PyArg_UnpackTuple, %r10
	leaq	296(%rsp), %r8
	leaq	288(%rsp), %r9
	movl	$4, %edx
	movl	$4, %ecx
	xorl	%ebx, %ebx
	movq	%rax, 8(%rsp)
	leaq	280(%rsp), %rax
	movq	%rax, (%rsp)
	xorl	%eax, %eax
	callq	*%r10
	testl	%eax, %eax
	je	.LBB1_21
	movabsq	$_ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	cmpq	$0, (%rax)
	je	.LBB1_2
	movq	296(%rsp), %rdi
	movabsq	$NRT_adapt_ndarray_from_python, %r15
	leaq	304(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 304(%rsp)
	vmovups	%ymm0, 336(%rsp)
	movq	$0, 368(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 328(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	cmpb	$1, %bl
	je	.LBB1_4
	testb	%bl, %bl
	jne	.LBB1_6
.LBB1_7:
	movq	288(%rsp), %rdi
	movq	304(%rsp), %r14
	movq	336(%rsp), %r12
	movq	344(%rsp), %r13
	movq	352(%rsp), %rbp
	leaq	464(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 464(%rsp)
	vmovups	%ymm0, 496(%rsp)
	vmovups	%ymm0, 528(%rsp)
	movq	$0, 560(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$2, 488(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	jne	.LBB1_8
	testb	%bl, %bl
	jne	.LBB1_14
.LBB1_10:
	movq	496(%rsp), %rax
	movq	280(%rsp), %rdi
	movq	464(%rsp), %rbx
	leaq	384(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	movq	%rbp, 264(%rsp)
	vmovups	%ymm0, 384(%rsp)
	vmovups	%ymm0, 416(%rsp)
	movq	$0, 448(%rsp)
	movq	%rax, 256(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 408(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bpl
	orb	%cl, %bpl
	jne	.LBB1_11
	testb	%bpl, %bpl
	jne	.LBB1_13
.LBB1_15:
	movq	384(%rsp), %rax
	movq	272(%rsp), %rdi
	movq	%r14, 248(%rsp)
	movq	416(%rsp), %rbp
	movq	432(%rsp), %r14
	movq	%rbx, 240(%rsp)
	movq	%r13, %r15
	movq	%r12, %rbx
	movq	%rax, 232(%rsp)
	movabsq	$PyNumber_Long, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_16
	movq	%rax, %r13
	movabsq	$PyLong_AsLongLong, %rax
	movq	%r13, %rdi
	callq	*%rax
	movq	%rax, %r12
	movabsq	$Py_DecRef, %rax
	movq	%r13, %rdi
	callq	*%rax
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	jne	.LBB1_17
.LBB1_20:
	movq	256(%rsp), %rax
	movq	264(%rsp), %rdi
	movq	%r12, 216(%rsp)
	movq	%r14, 192(%rsp)
	movq	%rbp, 176(%rsp)
	movq	%r15, 8(%rsp)
	movq	%rbx, (%rsp)
	movq	%rax, 72(%rsp)
	movq	%rdi, 16(%rsp)
	movabsq	$_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	leaq	376(%rsp), %rdi
	callq	*%rax
	movq	248(%rsp), %rdi
	movabsq	$NRT_decref, %rbx
	callq	*%rbx
	movq	240(%rsp), %rdi
	callq	*%rbx
	movq	232(%rsp), %rdi
	callq	*%rbx
	movabsq	$_Py_NoneStruct, %rbx
	movabsq	$Py_IncRef, %rax
	movq	%rbx, %rdi
	callq	*%rax
.LBB1_21:
	movq	%rbx, %rax
	addq	$568, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.LBB1_2:
	.cfi_def_cfa_offset 624
	movabsq	$PyExc_RuntimeError, %rdi
	movabsq	$".const.missing Environment: _ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.LBB1_4:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_7
.LBB1_6:
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.LBB1_8:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_10
	jmp	.LBB1_14
.LBB1_11:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bpl, %bpl
	je	.LBB1_15
	jmp	.LBB1_13
.LBB1_16:
	xorl	%r12d, %r12d
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_20
.LBB1_17:
	movq	232(%rsp), %rdi
	movabsq	$NRT_decref, %rax
	callq	*%rax
	movq	248(%rsp), %r14
	movq	240(%rsp), %rbx
.LBB1_13:
	movabsq	$NRT_decref, %rax
	movq	%rbx, %rdi
	callq	*%rax
.LBB1_14:
	movabsq	$NRT_decref, %rax
	movq	%r14, %rdi
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.Lfunc_end1:
	.size	_ZN7cpython8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end1-_ZN7cpython8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.cfi_endproc

	.globl	cfunc._ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	cfunc._ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
cfunc._ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	subq	$232, %rsp
	movq	240(%rsp), %rax
	movq	440(%rsp), %rdi
	movq	296(%rsp), %rcx
	movq	400(%rsp), %rdx
	movq	416(%rsp), %rsi
	movq	$0, 224(%rsp)
	movq	%r9, 8(%rsp)
	movq	%r8, (%rsp)
	movq	%rdi, 216(%rsp)
	movq	%rax, 16(%rsp)
	movabsq	$_ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	leaq	224(%rsp), %rdi
	movq	%rsi, 192(%rsp)
	movq	%rdx, 176(%rsp)
	movq	%rcx, 72(%rsp)
	callq	*%rax
	movq	224(%rsp), %rax
	addq	$232, %rsp
	retq
.Lfunc_end2:
	.size	cfunc._ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end2-cfunc._ZN8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx

	.weak	NRT_decref
	.p2align	4
	.type	NRT_decref,@function
NRT_decref:
	.cfi_startproc
	testq	%rdi, %rdi
	je	.LBB3_2
	#MEMBARRIER
	lock		decq	(%rdi)
	je	.LBB3_3
.LBB3_2:
	retq
.LBB3_3:
	movabsq	$NRT_MemInfo_call_dtor, %rax
	#MEMBARRIER
	jmpq	*%rax
.Lfunc_end3:
	.size	NRT_decref, .Lfunc_end3-NRT_decref
	.cfi_endproc

	.type	.const.score,@object
	.section	.lrodata,"al",@progbits
.const.score:
	.asciz	"score"
	.size	.const.score, 6

	.type	_ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@object
	.comm	_ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,8,8
	.type	".const.missing Environment: _ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx",@object
	.p2align	4, 0x0
".const.missing Environment: _ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx":
	.asciz	"missing Environment: _ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx"
	.size	".const.missing Environment: _ZN08NumbaEnv8__main__5scoreB2v1B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", 228

	.type	".const.can't unbox array from PyObject into native value.  The object maybe of a different type",@object
	.p2align	4, 0x0
".const.can't unbox array from PyObject into native value.  The object maybe of a different type":
	.asciz	"can't unbox array from PyObject into native value.  The object maybe of a different type"
	.size	".const.can't unbox array from PyObject into native value.  The object maybe of a different type", 89

	.section	".note.GNU-stack","",@progbits
